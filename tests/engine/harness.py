"""What the tests stand on: real stacks, one at a time; a gate between D and P; turns over plain HTTP.

`Stacks.get` starts the stack that a test names and ends the one before. `Talk` runs turns of one session and keeps
their token ids; `recomputed` asks stock vLLM on P for the same tokens, with an empty prefix cache. `Gate` stands
between D and P where a test wants to see, change, hold or lose what they tell each other.
"""

from __future__ import annotations

import json
import re
import secrets
import signal
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx

from server_ext.launch.command import Role, StackConfig, kv_transfer_config
from server_ext.launch.stack import Stack, ensure_secret, free_ports
from server_ext.launch.tiny import TINY, ensure_tiny

BLOCK_SIZE = 32
MAX_MODEL_LEN = 1536
# 128 blocks of 32 KiB (two layers, two heads), one of which is vLLM's null block.
POOL_BYTES = 128 * 32 * 1024
POOL_BLOCKS = 127
PREFILL_PATH = "/bidikv/prefill"
# Small, so that a test can meet P in the middle of a prefill.
PREFILL_STEP_TOKENS = 16
PREFILL_LEASE_S = 6

# A machine with two cores that does other things as well may take long; nothing here waits for time to pass.
DEADLINE_S = 60.0
_POLL_S = 0.02


def eventually(condition: Callable[[], Any], what: str, *, deadline_s: float = DEADLINE_S) -> Any:
    """Return the first true value of `condition`; fail, naming `what`, where none comes in time."""
    end_s = time.monotonic() + deadline_s
    while not (value := condition()):
        assert time.monotonic() < end_s, f"not within {deadline_s:g} s: {what}"
        time.sleep(_POLL_S)
    return value


# ---------------------------------------------------------------- stacks


@dataclass
class Plan:
    """What tells one stack of this suite from another."""

    settings: dict[str, Any]
    api_keys: tuple[str, ...] = ()
    gated: bool = False


class Stacks:
    """Starts what is asked for, and keeps it until something else is."""

    def __init__(self, folder: Path, plans: Mapping[str, Plan]) -> None:
        self._folder = folder
        self._plans = plans
        self._name = ""
        self._running: Rig | None = None

    def get(self, name: str) -> Rig:
        """Return the named stack, ready and whole."""
        if self._name != name:
            self.stop()
            self._name = name
            self._running = Rig.start(self._folder / name, self._plans[name])
        # One that did not start fails its first test with the reason; trying again for each would take hours.
        assert self._running is not None, f"stack {name} did not start; see the first test that needed it"
        return self._running

    def stop(self) -> None:
        """End what runs."""
        if self._running is not None:
            self._running.close()
        self._running = None


class Rig:
    """One running stack, and clients of its engines."""

    def __init__(self, stack: Stack, plan: Plan, secret: bytes, gate_port: int) -> None:
        self.stack = stack
        self.secret = secret
        self.api_keys = plan.api_keys
        self.gate_port = gate_port
        self.decode, self.prefill = (
            # The engines close idle connections after 5 s: one that is about to be closed must not be used.
            httpx.Client(base_url=url, timeout=DEADLINE_S, trust_env=False, limits=httpx.Limits(keepalive_expiry=1.0))
            for url in (stack.url, stack.prefill_url)
        )
        self.threads = ThreadPoolExecutor(8)
        self.stopped: set[Role] = set()
        self.dead: set[Role] = set()

    @classmethod
    def start(cls, folder: Path, plan: Plan) -> Rig:
        """Start both engines and wait until they answer."""
        prefill, decode = free_ports()
        gate_port = free_ports()[0].http
        secret_file = ensure_secret(folder)
        settings = dict(plan.settings)
        if plan.gated:
            # Nobody listens at the gate unless a test does; then D goes on to P itself.
            urls = [f"http://127.0.0.1:{port}" for port in (gate_port, prefill.http)]
            settings["prefill_urls"] = urls
        prefill_args = ["--long-prefill-token-threshold", str(PREFILL_STEP_TOKENS)]
        config = StackConfig(
            model=str(ensure_tiny()),
            served_name=TINY,
            prefill=prefill,
            decode=decode,
            secret_file=secret_file,
            kv_cache_bytes=POOL_BYTES,
            max_model_len=MAX_MODEL_LEN,
            tool_call_parser="hermes",
            api_keys=plan.api_keys,
            fresh_prefill_salt=True,
            settings=settings,
            extra_env={"VLLM_SERVER_DEV_MODE": "1"},
        )
        transfer = kv_transfer_config(config, "prefill")
        # What D never comes for: P keeps it for half a minute by default.
        transfer["kv_connector_extra_config"]["kv_lease_duration"] = PREFILL_LEASE_S
        prefill_args += ["--kv-transfer-config", json.dumps(transfer)]
        config = replace(config, extra_args={"prefill": tuple(prefill_args)})
        stack = Stack(config, folder)
        try:
            stack.start()
            stack.wait_ready()
        except BaseException:
            stack.stop()
            raise
        return cls(stack, plan, secret_file.read_bytes(), gate_port)

    def close(self) -> None:
        """End the engines."""
        self.threads.shutdown(wait=False, cancel_futures=True)
        self.decode.close()
        self.prefill.close()
        self.stack.stop()

    # What happens to engines

    @contextmanager
    def frozen(self, role: Role) -> Any:
        """Stop one engine's processes (SIGSTOP) for the length of a block."""
        self.stack.kill(role, signal.SIGSTOP)
        try:
            yield
        finally:
            self.stack.kill(role, signal.SIGCONT)

    def kill(self, role: Role) -> None:
        """Kill one engine; `restart` must follow before the test ends, or `repair` does it."""
        self.dead.add(role)
        self.stack.kill(role)

    def restart(self, role: Role) -> None:
        """Start one engine anew, on its ports."""
        self.stack.restart(role)
        self.dead.discard(role)

    def repair(self) -> None:
        """Start again what a test has killed and left."""
        for role in list(self.dead):
            self.restart(role)

    def log(self, role: Role) -> str:
        """What an engine has logged."""
        return self.stack.log_file(role).read_text("utf-8", errors="replace")

    # What they say

    def headers(self, key: str | None = None) -> dict[str, str]:
        """Headers of a caller, by default the first tenant."""
        key = key or (self.api_keys[0] if self.api_keys else None)
        return {"Authorization": f"Bearer {key}"} if key else {}

    def talk(self, session_id: str | None = None, *, key: str | None = None) -> Talk:
        """Return a new session; its first turn opens it."""
        return Talk(self, session_id or f"test-{uuid.uuid4().hex}", self.headers(key))

    def sessions(self, key: str | None = None) -> list[dict[str, Any]]:
        """Return a tenant's sessions."""
        return self.decode.get("/v1/sessions", headers=self.headers(key)).raise_for_status().json()["data"]

    def end_sessions(self) -> None:
        """End every session of every tenant."""
        for key in self.api_keys or (None,):
            for session in self.sessions(key):
                self.decode.post(f"/v1/sessions/{session['session']}/end", headers=self.headers(key)).raise_for_status()

    def pool(self) -> dict[str, int]:
        """Return D's pool, through a session opened for that."""
        name = f"probe-{uuid.uuid4().hex}"
        headers = self.headers()
        opened = self.decode.post("/v1/sessions", json={"session_id": name}, headers=headers).raise_for_status()
        self.decode.delete(f"/v1/sessions/{name}", headers=headers).raise_for_status()
        return opened.json()["bidikv"]["pool"]

    def metric(self, role: Role, name: str) -> float:
        """Return a metric of one engine, summed over its labels; 0 where it has none yet."""
        client = self.prefill if role == "prefill" else self.decode
        text = client.get("/metrics").raise_for_status().text
        values = re.findall(rf"^{re.escape(name)}(?:{{[^}}]*}})? (\S+)$", text, re.MULTILINE)
        return sum(map(float, values))

    def step(self, role: Role) -> None:
        """Make one engine take a step, so that its gauges are those of now."""
        client = self.prefill if role == "prefill" else self.decode
        body = {"model": TINY, "prompt": "x", "max_tokens": 1, "cache_salt": secrets.token_hex(8)}
        client.post("/v1/completions", json=body, headers=self.headers()).raise_for_status()

    def is_at_rest(self) -> bool:
        """Tell whether neither engine holds a block for anything, nor runs or queues a request."""
        for role in ("prefill", "decode"):
            self.step(role)
            busy = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
            if any(self.metric(role, f"vllm:{name}") for name in busy):
                return False
        return self.pool() == {"free_blocks": POOL_BLOCKS, "total_blocks": POOL_BLOCKS, "pending_ticket_blocks": 0}

    def text_of(self, token_ids: Sequence[int]) -> str:
        """Return the text of token ids, special tokens as well."""
        body = {"model": TINY, "tokens": list(token_ids)}
        return self.prefill.post("/detokenize", json=body).raise_for_status().json()["prompt"]

    def ids_of(self, text: str) -> list[int]:
        """Return the token ids of a text."""
        body = {"model": TINY, "prompt": text, "add_special_tokens": False}
        return self.prefill.post("/tokenize", json=body).raise_for_status().json()["tokens"]

    def recomputed(self, prompt_ids: Sequence[int], num_tokens: int) -> list[int]:
        """Return the tokens that stock vLLM generates on P behind a prompt, nothing of which is cached."""
        body = {
            "model": TINY,
            "prompt": list(prompt_ids),
            "max_tokens": num_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            "cache_salt": secrets.token_hex(8),
        }
        reply = self.prefill.post("/v1/completions", json=body).raise_for_status().json()
        return reply["choices"][0]["token_ids"]


# ---------------------------------------------------------------- turns


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


# ---------------------------------------------------------------- between D and P

Call = dict[str, Any]
"""A prefill call's body."""


class Gate:
    """Stands in P's place: hands each call to `handle`, which may pass it on.

    * **calls** - bodies of all calls so far.
    """

    def __init__(self, rig: Rig, handle: Callable[[Gate, Call], httpx.Response | None]) -> None:
        self.calls: list[Call] = []
        self._rig = rig
        gate = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:  # noqa: N802 - the library's name
                """Answer one call; where `handle` gives nothing, the connection ends without an answer."""
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                gate.calls.append(body)
                gate.headers = {name: self.headers[name] for name in ("Authorization", "X-Request-Id")}
                reply = handle(gate, body)
                self.close_connection = True
                if reply is None:
                    return
                self.send_response(reply.status_code)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(reply.content)))
                self.end_headers()
                self.wfile.write(reply.content)

            def log_message(self, *_: Any) -> None:
                """Say nothing."""

        self.headers: dict[str, str] = {}
        self._server = ThreadingHTTPServer(("127.0.0.1", rig.gate_port), Handler)
        self._server.daemon_threads = True

    def pass_on(self, body: Call) -> httpx.Response:
        """Call P with this body, as D would."""
        return self._rig.prefill.post(PREFILL_PATH, json=body, headers=self.headers)

    def __enter__(self) -> Gate:
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._server.shutdown()
        self._server.server_close()


def ticket_of(call: Call) -> dict[str, Any]:
    """Return the ticket of a prefill call."""
    ticket = call["kv_transfer_params"]
    assert ticket["remote_block_ids"], "the call carries no ticket"
    return ticket
