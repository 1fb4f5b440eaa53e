"""Stock clients on the session transport, Anthropic's route and parents' ids: real engines, a real model."""

from typing import Any

import anthropic
import httpx2
import openai
import pytest

from bidikv_sdk import CurrentSession, async_session_transport, current_session, session_transport
from server_ext.launch.tiny import TINY

from .rig import Rig
from .talk import words

pytestmark = pytest.mark.anyio
GREEDY: dict[str, Any] = {"model": TINY, "temperature": 0, "max_tokens": 12}
SYSTEM = {"role": "system", "content": words(80)}


def check_fetched(session: CurrentSession, reply: Any) -> None:
    """All that D held was fetched, as the session and the reply's usage tell."""
    cache = session.cache
    assert cache is not None
    assert (cache.outcome, cache.diverged_at) == ("fetched", None)
    assert 0 < cache.fetched_tokens == cache.held_tokens
    assert reply.usage.prompt_tokens_details.cached_tokens == cache.fetched_tokens


def test_the_openai_client(rig: Rig) -> None:
    """From the second completion on the history is fetched; a hold renews, and the end of the block gives all back."""
    http_client = httpx2.Client(transport=session_transport(httpx2))
    with openai.OpenAI(base_url=f"{rig.stack.url}/v1", api_key="none", http_client=http_client) as client:
        messages: list[Any] = [SYSTEM]
        with current_session("stock", route="fetch", on_exit="end") as session:
            for number in range(3):
                messages.append({"role": "user", "content": f"And {number}?"})
                reply = client.chat.completions.create(messages=messages, **GREEDY)
                messages.append(reply.choices[0].message.model_dump(exclude_none=True))
                if number:
                    check_fetched(session, reply)
                with session.hold(ttl_s=700) as hold:
                    pass
                assert not hold.lost
            assert session.extend(800) is not None
            assert session.lease is not None
            assert session.lease.remaining_s > 790
    assert rig.sessions() == []


async def test_the_async_openai_client_streams(rig: Rig) -> None:
    """The report is seen in a stream's last chunk."""
    http_client = httpx2.AsyncClient(transport=async_session_transport(httpx2))
    async with openai.AsyncOpenAI(base_url=f"{rig.stack.url}/v1", api_key="none", http_client=http_client) as client:
        messages: list[Any] = [SYSTEM]
        async with current_session("stock", route="fetch", on_exit="release") as session:
            for number in range(2):
                messages.append({"role": "user", "content": f"And {number}?"})
                stream = await client.chat.completions.create(messages=messages, stream=True, **GREEDY)
                text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices])
                messages.append({"role": "assistant", "content": text})
                assert session.info is not None
                assert session.info.turn == number + 1
            assert session.cache is not None
            assert session.cache.fetched_tokens == session.cache.held_tokens > 0
        assert session.lease is not None
        assert session.lease.state == "released"


def test_a_sub_agent_begins_on_its_parents_cache(rig: Rig) -> None:
    """The child's first prompt fetches the parent's history, and both go on."""
    http_client = httpx2.Client(transport=session_transport(httpx2))
    with openai.OpenAI(base_url=f"{rig.stack.url}/v1", api_key="none", http_client=http_client) as client:
        messages: list[Any] = [SYSTEM, {"role": "user", "content": "Hi"}]
        with current_session("parent", route="fetch") as parent:
            reply = client.chat.completions.create(messages=messages, **GREEDY)
            messages.append(reply.choices[0].message.model_dump(exclude_none=True))
            with parent.fork("child") as child:
                asked = [*messages, {"role": "user", "content": "You do this."}]
                extra = {"return_token_ids": True}
                reply = client.chat.completions.create(messages=asked, extra_body=extra, **GREEDY)
                check_fetched(child, reply)
                (ids, prompt_ids) = reply.choices[0].model_extra["token_ids"], reply.model_extra["prompt_token_ids"]
                assert ids == rig.recomputed(prompt_ids, len(ids))
            asked = [*messages, {"role": "user", "content": "And I that."}]
            check_fetched(parent, client.chat.completions.create(messages=asked, **GREEDY))


def test_the_anthropic_client(rig: Rig) -> None:
    """Its messages are served within the session, and say what was read from its cache."""
    http_client = httpx2.Client(transport=session_transport(httpx2))
    with anthropic.Anthropic(base_url=rig.stack.url, api_key="none", http_client=http_client) as client:
        messages: list[Any] = [{"role": "user", "content": "Hi"}]
        with current_session("claude", route="fetch") as session:
            options: dict[str, Any] = {"model": TINY, "max_tokens": 12, "system": words(80)}
            options["extra_body"] = {"temperature": 0}
            first = client.messages.create(messages=messages, **options)
            messages += [{"role": "assistant", "content": first.content}, {"role": "user", "content": "More"}]
            second = client.messages.create(messages=messages, **options)
            held = first.usage.input_tokens + (first.usage.cache_read_input_tokens or 0)
            assert second.usage.cache_read_input_tokens is not None
            assert second.usage.cache_read_input_tokens >= held
            info = session.release()
        assert info is not None
        assert (info.turn, info.lease.state) == (2, "released")
