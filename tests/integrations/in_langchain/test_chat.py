"""`ChatBidiKV` by itself: where a call's session comes from, what it sends, and what it brings back."""

from collections.abc import Callable
from typing import Any

import pytest
from langchain_core.messages import AIMessage, HumanMessage
from pydantic import ValidationError

from bidikv_sdk import current_session
from bidikv_sdk.integrations.langchain import ChatBidiKV
from bidikv_sdk.testing import FakeServer


async def ask(model: Any, messages: Any, way: str, config: Any = None) -> AIMessage:
    """Ask in one of LangChain's four ways."""
    if way == "invoke":
        return model.invoke(messages, config)
    if way == "ainvoke":
        return await model.ainvoke(messages, config)
    if way == "stream":
        chunks = list(model.stream(messages, config))
    else:
        chunks = [chunk async for chunk in model.astream(messages, config)]
    whole = chunks[0]
    for chunk in chunks[1:]:
        whole += chunk
    return whole


WAYS = ("invoke", "ainvoke", "stream", "astream")


def named(server: FakeServer) -> list[str | None]:
    """Return the sessions that the completions named."""
    chats = [request for request in server.requests if request.verb == "chat"]
    # Routers hash header and body apart: both must say the same.
    assert all(chat.body.get("session_id") == chat.headers.get("x-session-id") for chat in chats)
    return [chat.session_id for chat in chats]


@pytest.mark.parametrize("way", WAYS)
async def test_without_a_session(server: FakeServer, model: ChatBidiKV, way: str) -> None:
    """A call that names none is served as by stock vLLM, and reports nothing."""
    answer = await ask(model, "Hello there", way)
    assert answer.text == "Hello there"
    assert named(server) == [None]
    assert "bidikv" not in answer.response_metadata


@pytest.mark.parametrize("way", WAYS)
async def test_the_report(server: FakeServer, model: ChatBidiKV, way: str) -> None:
    """The second turn says where its cache came from, in the metadata and as LangChain counts it."""
    bound = model.bind(session_id="s1")
    first = HumanMessage("one two three")
    answer = await ask(bound, [first], way)
    assert answer.response_metadata["bidikv"]["turn"] == 1
    answer = await ask(bound, [first, answer, HumanMessage("four")], way)
    report = answer.response_metadata["bidikv"]
    assert (report["session"], report["turn"], report["lease"]["state"]) == ("s1", 2, "active")
    assert report["cache"]["outcome"] == "fetched"
    assert report["cache"]["fetched_tokens"] == report["cache"]["held_tokens"] > 0
    assert answer.usage_metadata is not None
    assert answer.usage_metadata["input_token_details"]["cache_read"] == report["cache"]["fetched_tokens"]
    assert named(server) == ["s1", "s1"]


@pytest.mark.parametrize("way", WAYS)
async def test_where_the_session_comes_from(server: FakeServer, model: ChatBidiKV, way: str) -> None:
    """What is nearest to the call wins: what is bound to the model, then the call's metadata, then the block around."""
    metadata = {"metadata": {"bidikv_session": "from-metadata"}}
    with current_session("from-block", route="local", ttl_s=7):
        await ask(model.bind(session_id="bound"), "x", way, metadata)
        await ask(model, "x", way, metadata)
        await ask(model, "x", way)
    assert named(server) == ["bound", "from-metadata", "from-block"]
    assert server.requests[-1].body["bidikv"] == {"protocol": 1, "route": "local", "ttl_s": 7}


@pytest.mark.parametrize("way", WAYS)
async def test_the_models_own_options(server: FakeServer, url: str, way: str) -> None:
    """Route and time to live go with every call, and what the caller puts into the body stays."""
    model = ChatBidiKV(base_url=url, model="fake", route="fetch", ttl_s=30, extra_body={"top_k": 1})
    await ask(model.bind(session_id="s1"), "x", way)
    body = server.requests[-1].body
    assert body["bidikv"] == {"protocol": 1, "route": "fetch", "ttl_s": 30}
    assert body["top_k"] == 1


def test_a_block_around_calls(server: FakeServer, model: ChatBidiKV, is_renewed: Callable[[], bool]) -> None:
    """The block's session can be held, and is given back at its end, as with a stock client."""
    with current_session("s1", on_exit="release") as session:
        model.invoke("x")
        with session.hold():
            while not is_renewed():
                pass
        assert server.info("s1").lease.state == "active"
    assert server.info("s1").lease.state == "released"


def test_a_session_by_its_id(server: FakeServer, model: ChatBidiKV) -> None:
    """The model's `session` reaches the server: it can give back the cache of a session that it only knows by name."""
    model.bind(session_id="s1").invoke("x")
    assert server.info("s1").lease.state == "active"
    session = model.session("s1")
    session.release()
    assert server.info("s1").lease.state == "released"


def test_the_key_is_never_openais(server: FakeServer, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a key of its own it sends none of OpenAI's, and its own goes with control calls too."""
    monkeypatch.setenv("OPENAI_API_KEY", "secret-of-openai")
    ChatBidiKV(base_url=url, model="fake").invoke("x")
    assert server.requests[-1].headers["authorization"] == "Bearer none"
    monkeypatch.setenv("BIDIKV_API_KEY", "ours")
    model = ChatBidiKV(base_url=url, model="fake")
    model.bind(session_id="s1").invoke("x")
    model.session("s1").release()
    assert [request.headers["authorization"] for request in server.requests[-2:]] == ["Bearer ours"] * 2


def test_no_server() -> None:
    """Without a base URL nothing is sent to OpenAI: the error names what to set."""
    with pytest.raises(ValidationError, match="BIDIKV_BASE_URL"):
        ChatBidiKV(model="fake")
