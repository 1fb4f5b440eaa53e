"""Turns of one session over plain HTTP, without the SDK's help: asked, read, and checked."""

from __future__ import annotations

import json
import secrets
from contextlib import closing, contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection
from typing import TYPE_CHECKING, Any

from server_ext.launch.tiny import TINY

from .common import eventually

if TYPE_CHECKING:
    from collections.abc import Mapping
    from concurrent.futures import Future

    import httpx

    from .rig import Rig


@dataclass
class Said:
    """One turn as its client saw it."""

    prompt_ids: list[int]
    ids: list[int]
    message: dict[str, Any]
    finish_reason: str
    bidikv: dict[str, Any]

    @property
    def cache(self) -> dict[str, Any]:
        """The cache report."""
        return self.bidikv["cache"]

    @property
    def lease(self) -> dict[str, Any]:
        """The lease after the turn."""
        return self.bidikv["lease"]

    @property
    def pool(self) -> dict[str, int]:
        """D's pool after the turn."""
        return self.bidikv["pool"]

    @property
    def came(self) -> tuple[str, str]:
        """Outcome and reason."""
        return self.cache["outcome"], self.cache["reason"]


class Talk:
    """One session, turn by turn."""

    def __init__(self, rig: Rig, session_id: str, headers: Mapping[str, str]) -> None:
        self.rig = rig
        self.id = session_id
        self.headers = {"X-Session-ID": session_id, **headers}
        self.num_turns = 0
        self.last: Said | None = None

    def request(self, delta: Any, *, turn: int | None = None, **chat: Any) -> dict[str, Any]:
        """Return the body of the next turn: greedy, with token ids, and what the test adds."""
        options = {name: chat.pop(name) for name in ("route", "ttl_s") if name in chat}
        return {
            "model": TINY,
            "session_id": self.id,
            "turn": turn if turn is not None else self.num_turns + 1,
            "messages": [{"role": "user", "content": delta}] if isinstance(delta, str) else delta,
            "temperature": 0,
            "max_tokens": 12,
            "return_token_ids": True,
            "bidikv": {"protocol": 1, **options},
            **chat,
        }

    def post(self, verb: str, body: Any = None, *, key: str | None = None, **options: Any) -> httpx.Response:
        """Send one call of this session."""
        headers = {**self.headers, **({"Idempotency-Key": key} if key else {})}
        return self.rig.decode.post(f"/v1/sessions/{self.id}/{verb}", json=body, headers=headers, **options)

    def turn(self, delta: Any, *, stream: bool = False, key: str | None = None, **chat: Any) -> Said:
        """Run the next turn and check what is true of every one."""
        body = self.request(delta, stream=stream, **chat)
        response = self.post("turns", body, key=key)
        assert response.status_code == 200, response.text
        said = read_stream(response.text) if stream else read_completion(response.json())
        self.took(said)
        return said

    def took(self, said: Said) -> None:
        """Take a turn as the session's last one."""
        self.num_turns += 1
        self.last = said
        cache = said.cache
        assert said.bidikv["turn"] == self.num_turns
        assert said.bidikv["session"] == self.id
        assert cache["prompt_tokens"] == len(said.prompt_ids)
        parts = [cache[f"{part}_tokens"] for part in ("reused", "fetched", "computed")]
        assert sum(parts) == len(said.prompt_ids)
        assert min(parts) >= 0

    def right_turn(self, delta: Any, **options: Any) -> Said:
        """Run the next turn; it continues D's own ids, and gives the tokens of a recompute."""
        before = self.last
        said = self.turn(delta, **options)
        assert said.ids == self.rig.recomputed(said.prompt_ids, len(said.ids))
        if before is not None:
            held = before.prompt_ids + before.ids
            assert said.prompt_ids[: said.cache["held_tokens"]] == held[: said.cache["held_tokens"]]
        return said

    def fetched_turn(self, delta: Any, **options: Any) -> Said:
        """Run the next turn; P fetched all that D held, and the answer is right."""
        said = self.right_turn(delta, **options)
        assert said.cache["outcome"] == "fetched", said.cache
        assert said.cache["diverged_at"] is None
        assert said.cache["held_tokens"] > 0
        # P's own cache never hits in these stacks; the last token of a prompt is always computed.
        assert said.cache["fetched_tokens"] == said.cache["held_tokens"]
        return said

    def fork(self, before: Said | None = None, *, at_turn: int | None = None, **fields: Any) -> Talk:
        """Return a child; `before` is the turn that it goes on from, `at_turn` its number, by default the last."""
        child = Talk(self.rig, f"{self.id}-child-{secrets.token_hex(4)}", self.headers)
        child.headers["X-Session-ID"] = child.id
        child.num_turns = self.num_turns if at_turn is None else at_turn
        child.last = self.last if at_turn is None else before
        body = {"session_id": self.id, "child_id": child.id, "at_turn": at_turn, **fields}
        info = self.post("fork", body).raise_for_status().json()["bidikv"]
        assert (info["session"], info["turn"]) == (child.id, child.num_turns)
        return child

    def rewind(self, before: Said, *, turn: int) -> dict[str, Any]:
        """Go back to the end of a turn, which was `before`."""
        info = self.post("rewind", {"turn": turn}).raise_for_status().json()["bidikv"]
        self.num_turns, self.last = turn, before
        return info

    def info(self) -> dict[str, Any]:
        """Ask for the session's state."""
        reply = self.rig.decode.get(f"/v1/sessions/{self.id}", headers=self.headers)
        return reply.raise_for_status().json()["bidikv"]

    def lease(self) -> dict[str, Any]:
        """Ask for the session's lease."""
        return self.info()["lease"]

    def release(self) -> dict[str, Any]:
        """Give the cache back."""
        return self.post("release").raise_for_status().json()["bidikv"]

    def is_running(self) -> bool:
        """Tell whether a turn of this session runs: an old number is refused for one of two reasons."""
        error = self.post("turns", self.request("?", turn=self.num_turns)).json()["error"]
        assert error["code"] == "turn_conflict"
        return "retry_after_s" in error

    def wait_until_idle(self) -> None:
        """Wait until no turn runs, as after its client has left."""
        eventually(lambda: not self.is_running(), f"end of the turn of session {self.id}")

    @contextmanager
    def asked(self, body: Mapping[str, Any]) -> Any:
        """Send a turn, and leave without reading its reply when the block ends."""
        url = self.rig.decode.base_url
        with closing(HTTPConnection(url.host, url.port)) as connection:
            headers = {**self.headers, "Content-Type": "application/json"}
            connection.request("POST", f"/v1/sessions/{self.id}/turns", json.dumps(body), headers)
            eventually(self.is_running, f"a running turn of session {self.id}")
            yield

    def in_background(self, delta: Any, **options: Any) -> Future[Said]:
        """Run the next turn in a thread."""
        return self.rig.threads.submit(self.turn, delta, **options)


def read_completion(reply: Mapping[str, Any]) -> Said:
    """Read a reply that came at once."""
    (choice,) = reply["choices"]
    return Said(
        prompt_ids=reply["prompt_token_ids"],
        ids=choice["token_ids"],
        message=choice["message"],
        finish_reason=choice["finish_reason"],
        bidikv=reply["bidikv"],
    )


def events_of(text: str) -> list[dict[str, Any]]:
    """Return the chunks of a stream that ended in order."""
    *events, done = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert done == "[DONE]"
    return [json.loads(event) for event in events]


def read_stream(text: str) -> Said:
    """Add up a streamed reply, without the SDK's help."""
    chunks = events_of(text)
    *deltas, last = chunks
    assert last["choices"] == []
    assert last["usage"] is not None
    choices = [chunk["choices"][0] for chunk in deltas]
    content = "".join(choice["delta"].get("content") or "" for choice in choices)
    calls = [call for choice in choices for call in choice["delta"].get("tool_calls") or ()]
    message: dict[str, Any] = {"role": "assistant", "content": content}
    if calls:
        arguments = "".join(call["function"].get("arguments") or "" for call in calls)
        first = calls[0]
        message["tool_calls"] = [{**first, "function": {**first["function"], "arguments": arguments}}]
    return Said(
        prompt_ids=next(chunk["prompt_token_ids"] for chunk in deltas if chunk.get("prompt_token_ids")),
        ids=[token for choice in choices for token in choice.get("token_ids") or ()],
        message=message,
        finish_reason=next(choice["finish_reason"] for choice in choices if choice["finish_reason"]),
        bidikv=last["bidikv"],
    )


def words(num_words: int, about: str = "apples") -> str:
    """Return a text of so many short words, no two texts about different things alike."""
    return " ".join(f"{about} {i}" if i % 2 else f"and {i}" for i in range(num_words // 2))
