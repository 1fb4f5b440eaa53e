"""The stock `openai` client with its whole history in every request: sessions on vLLM's own chat route."""

from collections.abc import Iterator
from typing import Any

import openai
import pytest

from server_ext.launch.tiny import TINY

from .rig import Rig
from .talk import words

GREEDY: dict[str, Any] = {"model": TINY, "temperature": 0, "max_tokens": 12}


@pytest.fixture
def client(rig: Rig) -> Iterator[openai.OpenAI]:
    """OpenAI's own client."""
    with openai.OpenAI(base_url=f"{rig.stack.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def ask(client: openai.OpenAI, messages: list[Any], *, stream: bool, session_id: str | None) -> dict[str, Any]:
    """Ask for one completion, take its reply into the messages, and return it as JSON."""
    extra: dict[str, Any] = {"return_token_ids": True}
    if session_id is not None:
        extra["session_id"] = session_id
    options = {**GREEDY, "messages": messages, "extra_body": extra}
    if not stream:
        reply = client.chat.completions.create(**options)
        messages.append(reply.choices[0].message.model_dump())
        said = reply.model_dump()
        return {**said, "ids": said["choices"][0]["token_ids"]}
    chunks = [
        chunk.model_dump()
        for chunk in client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True})
    ]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    messages.append({"role": "assistant", "content": "".join(c["delta"].get("content") or "" for c in choices)})
    ids = [token for choice in choices for token in choice.get("token_ids") or ()]
    prompt_ids = next(chunk["prompt_token_ids"] for chunk in chunks if chunk.get("prompt_token_ids"))
    return {**chunks[-1], "ids": ids, "prompt_token_ids": prompt_ids}


@pytest.mark.parametrize("stream", [False, True])
def test_a_conversation(rig: Rig, client: openai.OpenAI, stream: bool) -> None:
    """From the second turn on all that D holds is fetched, told as cached tokens, and the answers are right."""
    messages: list[Any] = [{"role": "system", "content": "Be terse."}, {"role": "user", "content": words(80)}]
    before: dict[str, Any] = {}
    for number in range(1, 5):
        said = ask(client, messages, stream=stream, session_id="openai")
        bidikv = said["bidikv"]
        cache = bidikv["cache"]
        assert (bidikv["session"], bidikv["turn"], bidikv["lease"]["state"]) == ("openai", number, "active")
        assert said["ids"] == rig.recomputed(said["prompt_token_ids"], len(said["ids"]))
        cached = said["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert cached == cache["reused_tokens"] + cache["fetched_tokens"]
        if before:
            held = (before["prompt_token_ids"] + before["ids"])[: cache["held_tokens"]]
            assert said["prompt_token_ids"][: len(held)] == held
            assert (cache["outcome"], cache["diverged_at"]) == ("fetched", None)
            assert cached == cache["held_tokens"] >= 0.95 * len(held)
        before = said
        messages.append({"role": "user", "content": f"And {number}?"})


def test_an_edited_history(rig: Rig, client: openai.OpenAI) -> None:
    """Where the client edits what was said, the common prefix is fetched, and the answer is that of a recompute."""
    messages: list[Any] = [{"role": "user", "content": words(80)}]
    ask(client, messages, stream=False, session_id="edited")
    messages[-1] = {"role": "assistant", "content": "Something else."}
    messages.append({"role": "user", "content": "And now?"})
    said = ask(client, messages, stream=False, session_id="edited")
    cache = said["bidikv"]["cache"]
    assert (cache["outcome"], cache["reason"]) == ("fetched", "messages_changed")
    assert 0 < cache["fetched_tokens"] == cache["diverged_at"] < cache["held_tokens"]
    assert said["ids"] == rig.recomputed(said["prompt_token_ids"], len(said["ids"]))


def test_without_a_session_nothing_is_kept(rig: Rig, client: openai.OpenAI) -> None:
    """The answer is that of stock vLLM: no report, no session, no lease."""
    messages: list[Any] = [{"role": "user", "content": words(80)}]
    said = ask(client, messages, stream=False, session_id=None)
    assert "bidikv" not in said
    assert rig.sessions() == []
