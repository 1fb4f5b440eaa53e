"""Stock clients made session-aware: what the transport does to requests and sees of replies, over both HTTP modules."""

import asyncio
import contextvars
import gzip
import json
import logging
import threading

import anthropic
import httpx
import httpx2
import openai
import pytest

from bidikv_sdk import active_session, async_session_transport, current_session, session_transport
from bidikv_sdk.testing import FakeServer

from .conftest import Awaitable

pytestmark = pytest.mark.anyio

URL = "http://fake/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "one two three"}]


@pytest.fixture(params=[httpx, httpx2], ids=lambda module: module.__name__)
def http(request):
    """Which HTTP module a client is made with."""
    return request.param


@pytest.fixture
def make_client(flavour, http):
    """Make an HTTP client over an inner transport: both flavours are used in the asynchronous way."""

    def make(inner=None, clock=None):
        if flavour == "sync":
            return Awaitable(http.Client(transport=session_transport(http, inner, clock=clock)))
        return http.AsyncClient(transport=async_session_transport(http, inner, clock=clock))

    return make


@pytest.fixture
def client(make_client, http, server):
    """An HTTP client of the fake server."""
    return make_client(server.transport(http), server.clock)


@pytest.fixture
def entered(flavour):
    """Enter what is both a synchronous and an asynchronous context manager in the flavour of the test."""
    return Awaitable if flavour == "sync" else (lambda manager: manager)


class Recorder:
    """An inner transport that keeps each request, in bytes, and answers with a body."""

    def __init__(self, http, reply=b"{}", **headers):
        self.requests = []
        self.is_closed = False

        def answer(request):
            self.requests.append(request)
            return http.Response(200, headers=headers, stream=http.ByteStream(reply))

        self.answer = answer

    def handle_request(self, request):
        """Answer."""
        request.read()
        return self.answer(request)

    async def handle_async_request(self, request):
        """Answer."""
        await request.aread()
        return self.answer(request)

    def close(self):
        """Note it."""
        self.is_closed = True

    async def aclose(self):
        """Note it."""
        self.is_closed = True

    def raw(self):
        """Return all of each request."""
        return [(str(r.url), r.method, r.headers.raw, r.content) for r in self.requests]


async def chat(client, *messages, url=URL, **fields):
    """Send a chat completion and return the reply."""
    return await client.post(url, json={"model": "m", "messages": [*(messages or MESSAGES)], **fields})


# ---------------------------------------------------------------- the request


async def test_without_a_session_nothing_changes(make_client, http):
    """The request is the client's own object."""
    recorder = Recorder(http)
    client = make_client(recorder)
    request = client.build_request("POST", URL, content=b'{ "a": 1.50 }')
    request = getattr(request, "value", request)
    await client.send(request)
    assert recorder.requests == [request]


async def test_a_session_is_named_in_header_and_body(make_client, http):
    """All else stays byte for byte, numbers and spaces too, and the length is right."""
    recorder = Recorder(http)
    client = make_client(recorder)
    body = b' {"model": "m",  "temperature": 1.50, "text": "\\u00e4", "messages": []}'
    await client.post(URL, content=body, headers={"X-Own": "a"})
    with current_session("s1"):
        await client.post(URL, content=body, headers={"X-Own": "a"})
    plain, named = recorder.raw()
    assert named[3] == b' {"session_id":"s1",' + body[2:]
    length = (b"Content-Length", str(len(body)).encode())
    assert sorted(named[2]) == sorted(
        [pair for pair in plain[2] if pair != length]
        + [(b"Content-Length", str(len(named[3])).encode()), (b"X-Session-ID", b"s1")]
    )
    assert named[:2] == plain[:2]


async def test_options_travel_in_the_body(client, server):
    """Route and time to live are said to the server; what the caller says itself wins."""
    with current_session("s1", route="local", ttl_s=9):
        await chat(client)
        await chat(client, bidikv={"ttl_s": 5})
    bodies = [request.body for request in server.requests]
    assert bodies[0]["bidikv"] == {"protocol": 1, "route": "local", "ttl_s": 9}
    assert bodies[1]["bidikv"] == {"ttl_s": 5}


@pytest.mark.parametrize(
    ("method", "url", "content", "headers"),
    [
        ("POST", "http://fake/v1/completions", b'{"prompt": "a"}', {}),
        ("POST", "http://fake/v1/threads/t/messages", b'{"role": "user"}', {}),
        ("GET", URL, b"", {}),
        ("POST", URL, b"not json", {}),
        ("POST", URL, b'["a"]', {}),
        ("POST", URL, '{"a": "ä"}'.encode("utf-16"), {}),
        ("POST", URL, gzip.compress(b'{"a": 1}'), {"Content-Encoding": "gzip"}),
        ("POST", URL, b'{"session_id": "own"}', {}),
        ("POST", URL, b'{"messages": []}', {"X-Session-ID": "own"}),
    ],
)
async def test_other_requests_pass_as_they_are(make_client, http, method, url, content, headers):
    """Other routes, what is no JSON object, and what names its session itself."""
    recorder = Recorder(http)
    client = make_client(recorder)
    with current_session("s1") as session:
        await client.request(method, url, content=content, headers=headers)
        assert session.info is None
    await client.request(method, url, content=content, headers=headers)
    assert recorder.raw()[0] == recorder.raw()[1]


async def test_an_empty_object_is_one_too(make_client, http):
    """No comma too many."""
    recorder = Recorder(http)
    with current_session("s1"):
        await make_client(recorder).post(URL, content=b"{}")
    assert json.loads(recorder.requests[0].content) == {"session_id": "s1"}


async def test_closing_the_client_closes_the_inner_transport(make_client, http, flavour):
    """The transport owns what it sends with."""
    recorder = Recorder(http)
    client = make_client(recorder)
    await (client.close() if flavour == "sync" else client.aclose())
    assert recorder.is_closed


# ---------------------------------------------------------------- the reply


async def test_the_last_completion_can_be_asked_for(client):
    """Cache and lease are those of the last reply; before it, and where no session served it, there are none."""
    with current_session("s1") as session:
        assert (session.info, session.cache, session.lease) == (None, None, None)
        reply = (await chat(client)).json()
        assert (session.cache.reason, session.lease.state) == ("first_turn", "active")
        said = [reply["choices"][0]["message"], {"role": "user", "content": "go on"}]
        await chat(client, *MESSAGES, *said)
        assert (session.cache.outcome, session.cache.fetched_tokens, session.info.turn) == ("fetched", 8, 2)
        await chat(client, n=2)
        assert session.info is None


@pytest.mark.parametrize("wants_usage", [False, True])
async def test_a_stream_is_seen_as_it_passes(client, server, wants_usage):
    """Each piece arrives when it is sent, before the turn is complete; the last one tells the report."""
    server.reply("a b c")
    with current_session("s1") as session:
        body = {"messages": MESSAGES, "stream": True, "stream_options": {"include_usage": wants_usage}}
        request = client.build_request("POST", URL, json=body)
        reply = await client.send(getattr(request, "value", request), stream=True)
        pieces = Awaitable(reply.iter_bytes()) if hasattr(client, "value") else reply.aiter_bytes()
        turns = [server.info("s1").turn async for _ in pieces]
        assert turns[:4] == [0, 0, 0, 0]
        assert (turns[-1], session.info.turn, session.cache.reason) == (1, 1, "first_turn")


async def test_a_compressed_reply_passes_unread(make_client, http):
    """It is not ours to unpack: the client gets it, and of the session nothing is known."""
    recorder = Recorder(http, gzip.compress(b'{"bidikv": {}}'), **{"Content-Encoding": "gzip"})
    with current_session("s1") as session:
        reply = await chat(make_client(recorder))
        assert reply.json() == {"bidikv": {}}
        assert session.info is None


@pytest.mark.parametrize("reply", [b"", b"[]", b'{"bidikv": {"protocol": 7}}', b"\xff"])
async def test_a_reply_that_makes_no_sense_reaches_the_client(make_client, http, reply):
    """What stands in it is the client's to judge."""
    with current_session("s1") as session:
        assert (await chat(make_client(Recorder(http, reply)))).content == reply
        assert session.info is None


# ---------------------------------------------------------------- around tools


async def test_a_hold_keeps_the_lease(client, server, entered, eventually):
    """It is renewed as the clock moves on, from the entering of the block on."""
    with current_session("s1") as session:
        await chat(client)
        async with entered(session.hold()) as hold:
            for number in range(1, 4):
                await eventually(lambda n=number: [r.verb for r in server.requests].count("extend") == n)
                server.advance(40)
            await eventually(lambda: [r.verb for r in server.requests].count("extend") == 4)
        assert (hold.lost, hold.lost_reason) == (False, None)
    assert server.info("s1").lease.remaining_s == 60
    assert {r.headers["x-session-id"] for r in server.requests} == {"s1"}


async def test_a_hold_before_the_first_completion_holds_nothing(server, entered):
    """There is no lease yet, and no server to ask."""
    async with entered(current_session("s1").hold()) as hold:
        pass
    assert (hold.lost, server.requests) == (False, [])


async def test_a_lost_lease_breaks_no_tool(client, server, entered, eventually, caplog):
    """It is logged and shown."""
    with current_session("s1") as session:
        await chat(client)
        server.revoke("s1")
        with caplog.at_level(logging.WARNING, "bidikv"):
            async with entered(session.hold()) as hold:
                await eventually(lambda: hold.lost)
    assert "lease" in hold.lost_reason
    assert "lease lost while held" in caplog.text


@pytest.mark.parametrize("client_kind", ["sync", "async"])
@pytest.mark.parametrize("hold_kind", ["sync", "async"])
async def test_tools_and_clients_of_both_kinds_go_together(server, http, eventually, client_kind, hold_kind):
    """Over real connections, a synchronous tool of an asynchronous client, and the other way round."""

    def num_extended():
        return [r.verb for r in server.requests].count("extend")

    with server.serve() as base_url:
        async with over_sockets(http, client_kind) as client, current_session("s1") as session:
            await chat(client, url=f"{base_url}/chat/completions")
            manager = session.hold()
            async with Awaitable(manager) if hold_kind == "sync" else manager as hold:
                await eventually(lambda: num_extended() == 1)
            assert not hold.lost
            assert session.release().lease.state == "released"
            await session.end_async()
    assert [r.verb for r in server.requests] == ["chat", "extend", "release", "end"]


def over_sockets(http, kind):
    """Return a client over a real connection, closed at the end of its block."""
    if kind == "async":
        return http.AsyncClient(transport=async_session_transport(http))
    return Awaitable(http.Client(transport=session_transport(http)))


@pytest.mark.parametrize(("on_exit", "state"), [("keep", "active"), ("release", "released"), ("end", None)])
async def test_what_becomes_of_a_session_is_said_at_its_beginning(client, server, entered, on_exit, state):
    """Its lease lives on, its cache is given back, or it is forgotten."""
    async with entered(current_session("s1", on_exit=on_exit)):
        await chat(client)
    if state is None:
        with pytest.raises(KeyError):
            server.info("s1")
    else:
        assert server.info("s1").lease.state == state


@pytest.mark.parametrize("verb", ["extend", "release", "end"])
async def test_verbs_never_raise_what_the_server_does(client, server, flavour, caplog, verb):
    """A refusal and a broken connection are logged; an unknown session, and one without a server, are nothing."""

    async def run(session):
        return getattr(session, verb)() if flavour == "sync" else await getattr(session, f"{verb}_async")()

    session = current_session("s1")
    assert await run(session) is None
    with session:
        await chat(client)
    server.fail("engine_unavailable", on=verb)
    server.fail("engine_unavailable", on=verb)
    assert await run(session) is None
    server.refuse(on=verb)
    server.refuse(on=verb)
    assert await run(session) is None
    assert [record.getMessage().split(":")[0] for record in caplog.records] == ["session s1"] * 2
    assert (await run(session)).session == "s1"
    server.forget()
    assert await run(session) is None
    assert len(caplog.records) == 2


async def test_control_calls_carry_the_callers_key(make_client, http, flavour):
    """Whose completion it was, theirs is the session."""
    server = FakeServer(api_key="secret")
    client = make_client(server.transport(http), server.clock)
    with current_session("s1") as session:
        body = {"messages": MESSAGES}
        assert (await client.post(URL, json=body, headers={"Authorization": "Bearer secret"})).status_code == 200
        released = session.release() if flavour == "sync" else await session.release_async()
    assert released.lease.state == "released"
    assert session.lease.state == "released"


# ---------------------------------------------------------------- which session is current


async def test_tasks_have_their_own_sessions(client):
    """Blocks that run at the same time in different tasks do not meet; inside each other the innermost counts."""

    async def task(name):
        with current_session(name) as session:
            await asyncio.sleep(0)
            await chat(client)
            with current_session(f"{name}-inner") as inner:
                await asyncio.sleep(0)
                await chat(client)
            assert active_session() is session
            return session.info.session, inner.info.session

    names = await asyncio.gather(*(task(f"s{i}") for i in range(3)))
    assert names == [(f"s{i}", f"s{i}-inner") for i in range(3)]
    assert active_session() is None


def test_a_block_may_end_in_another_context():
    """A framework that enters and leaves in different contexts neither fails nor leaves a session behind it."""
    session = current_session("s1")
    contextvars.copy_context().run(session.__enter__)
    session.__exit__(None, None, None)
    with current_session("outer") as outer, current_session("other"):
        outer.__exit__(None, None, None)
        assert active_session().id == "other"
    assert active_session() is None


def test_a_thread_with_its_starters_context_belongs_to_the_session():
    """As the pools of frameworks run tools; a bare thread does not."""
    seen = []
    with current_session("s1") as session:
        context = contextvars.copy_context()
        for target in (
            lambda: context.run(lambda: seen.append(active_session())),
            lambda: seen.append(active_session()),
        ):
            thread = threading.Thread(target=target)
            thread.start()
            thread.join()
    assert seen == [session, None]


async def test_a_fork_begins_on_its_parents_cache(client, server):
    """Its parent travels in header and body, and the first completion fetches what the two have in common."""
    with current_session("s1", route="fetch") as session:
        said = (await chat(client)).json()["choices"][0]["message"]
        with session.fork("child") as child:
            await chat(client, *MESSAGES, said, {"role": "user", "content": "go on"})
    request = server.requests[-1]
    assert (request.headers["x-session-id"], request.headers["x-parent-session-id"]) == ("child", "s1")
    assert (request.body["session_id"], request.body["parent_session_id"]) == ("child", "s1")
    assert request.body["bidikv"]["route"] == "fetch"
    assert (child.cache.fetched_tokens, child.info.turn, server.info("s1").turn) == (8, 2, 1)


def test_wrong_arguments_are_refused():
    """By name, before anything is sent."""
    for wrong in ({"session_id": "a/b"}, {"parent": "ä"}, {"route": "fly"}, {"on_exit": "drop"}):
        with pytest.raises(ValueError, match=repr(next(iter(wrong.values())))):
            current_session(**wrong)
    assert len(current_session().id) >= 16
    assert repr(current_session("s1")) == "<CurrentSession s1>"


# ---------------------------------------------------------------- the clients themselves


@pytest.mark.parametrize("stream", [False, True])
def test_the_openai_client_works_unchanged(server, http, stream):
    """Both HTTP modules under the real client, with tools and a hold around one."""
    call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"at": "x"}'}}
    server.reply(tool_calls=[call])
    transport = session_transport(http, server.transport(http), clock=server.clock)
    messages = list(MESSAGES)
    client = openai.OpenAI(base_url="http://fake/v1", api_key="k", http_client=http.Client(transport=transport))
    with client, current_session("s1") as session:
        for _ in range(2):
            if stream:
                with client.chat.completions.stream(model="m", messages=messages) as events:
                    message = events.get_final_completion().choices[0].message
            else:
                message = client.chat.completions.create(model="m", messages=messages).choices[0].message
            messages.append(message.model_dump(exclude_none=True))
            if message.tool_calls:
                with session.hold():
                    messages.append({"role": "tool", "tool_call_id": "c1", "content": "a wall"})
        assert (session.info.turn, session.cache.outcome) == (2, "fetched")


async def test_the_async_openai_client_works_unchanged(server, http):
    """Sessions that run at the same time keep apart."""
    transport = async_session_transport(http, server.async_transport(http), clock=server.clock)
    http_client = http.AsyncClient(transport=transport)
    async with openai.AsyncOpenAI(base_url="http://fake/v1", api_key="k", http_client=http_client) as client:

        async def agent(name):
            async with current_session(name, on_exit="release") as session:
                for _ in range(2):
                    await client.chat.completions.create(model="m", messages=MESSAGES)
                return session.info.session

        assert await asyncio.gather(*map(agent, "abc")) == ["a", "b", "c"]
    assert {server.info(name).lease.state for name in "abc"} == {"released"}


def test_the_anthropic_client_names_its_session():
    """Its messages carry the id in header and body, and control calls go to the same server."""
    seen = []

    def answer(request):
        seen.append(request)
        message = {"id": "m", "type": "message", "role": "assistant", "content": [], "model": "m"}
        usage = {"input_tokens": 1, "output_tokens": 1}
        return httpx2.Response(200, json={**message, "stop_reason": "end_turn", "stop_sequence": None, "usage": usage})

    http_client = httpx2.Client(transport=session_transport(httpx2, httpx2.MockTransport(answer)))
    client = anthropic.Anthropic(base_url="http://fake", api_key="k", http_client=http_client)
    with client, current_session("s1", on_exit="release"):
        client.messages.create(model="m", max_tokens=5, messages=MESSAGES)
    completion, release = seen
    assert (completion.headers["x-session-id"], json.loads(completion.content)["session_id"]) == ("s1", "s1")
    assert str(release.url) == "http://fake/v1/sessions/s1/release"
    assert release.headers["Authorization"] == completion.headers["Authorization"] == "Bearer k"
