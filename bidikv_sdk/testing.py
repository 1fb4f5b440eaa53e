"""A bidikv server in the process, for tests of agents: no sockets, no engine, no waiting.

    server = FakeServer()
    server.reply("Hello!")
    with server.client() as client, client.session() as session:
        assert session.send("Hi").text == "Hello!"

It keeps sessions and leases as `docs/http.md` says, on a clock that only `advance` and a client's back-off
move, and answers a turn by its script, or else with the text of the last message. It refuses what a real
server refuses about ids, numbers and versions, so a test finds wrong requests. Not imported by the package.
"""

from __future__ import annotations

import contextlib
import copy
import json
import uuid
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import unquote

import httpx

from bidikv_sdk._client import AsyncBidiKV, BidiKV
from bidikv_sdk._clock import Clock
from bidikv_sdk._fake import FakeStore, FakeTurn, Refused
from bidikv_sdk._fake_http import (
    VERBS,
    Broken,
    FakeReply,
    FakeRequest,
    error_reply,
    event_of,
    event_reply,
    json_reply,
    named_parent,
    route_of,
    served,
    transport_of,
)
from bidikv_sdk._fake_replies import ScriptedReply, chunks_of, last_chunk_of, whole_chunk_of
from bidikv_sdk.wire import PROTOCOL, ErrorInfo

if TYPE_CHECKING:
    import asyncio
    import threading
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from bidikv_sdk._types import Message
    from bidikv_sdk.wire import ErrorCode, Outcome, Reason, SessionInfo

__all__ = ["FakeServer", "ManualClock", "RecordedRequest"]

BASE_URL: Final = "http://fake.bidikv/v1"
_BROKEN: Final = ("ReadError", "scripted: the connection broke")
# How often a waiting keeper looks at the manual clock, in real seconds.
_POLL_S: Final = 0.001


class ManualClock(Clock):
    """Time that stands still until it is moved.

    Sleeping moves it at once and is recorded in `slept_s`; waiting, as between renewals, ends when `advance`
    has moved it far enough.
    """

    def __init__(self) -> None:
        self._now_s = 0.0
        self.slept_s: list[float] = []
        """Seconds of every sleep so far: the back-offs of retries."""

    def now_s(self) -> float:
        """Return the time, which began at 0."""
        return self._now_s

    def advance(self, seconds: float) -> None:
        """Move the time on."""
        self._now_s += seconds

    def sleep(self, delay_s: float) -> None:
        """Move the time on and record it."""
        self.slept_s.append(delay_s)
        self.advance(delay_s)

    async def sleep_async(self, delay_s: float) -> None:
        """Move the time on and record it."""
        self.sleep(delay_s)

    def wait(self, stop: threading.Event, delay_s: float) -> None:
        """Block until the time has come or `stop` is set."""
        deadline_s = self._now_s + delay_s
        while self._now_s < deadline_s and not stop.wait(_POLL_S):
            pass

    async def wait_async(self, stop: asyncio.Event, delay_s: float) -> None:
        """Suspend until the time has come or `stop` is set."""
        deadline_s = self._now_s + delay_s
        while self._now_s < deadline_s and not stop.is_set():
            await Clock.wait_async(self, stop, _POLL_S)


@dataclass(frozen=True, slots=True)
class RecordedRequest:
    """A request that the server got."""

    verb: str
    """`open`, `list`, `get`, `turns`, `extend`, `release`, `fork`, `rewind`, `end`; `chat`, `models`; else the path."""
    session_id: str | None
    headers: Mapping[str, str]
    """Names in lower case."""
    body: dict[str, Any]


@dataclass(slots=True)
class _Fault:
    verb: str | None
    respond: Callable[[], FakeReply] | None = None
    after_chunks: int = 0
    completed: bool = False


class FakeServer:
    """A server with scripted answers; see the module's docstring.

    What `reply` queues is used up in order, one per turn; what `fail`, `respond`, `refuse` and `drop` queue,
    one per request, and a fault with a verb (`on`) waits for a request of that verb.

    Args:
        ttl_s: Seconds that a lease lives where the caller asks for nothing.
        api_key: The only key that is accepted; None: any, or none.
        model: Name in the completions.
    """

    def __init__(self, *, ttl_s: float = 60.0, api_key: str | None = None, model: str = "fake") -> None:
        self.clock = ManualClock()
        self.requests: list[RecordedRequest] = []
        """Every request so far, refused and dropped ones too."""
        self._api_key = api_key
        self._store = FakeStore(self.clock, ttl_s, model)
        self._replies: deque[ScriptedReply] = deque()
        self._faults: list[_Fault] = []

    # ---------------------------------------------------------------- clients

    def client(self, base_url: str = BASE_URL, api_key: str | None = None, **options: Any) -> BidiKV:
        """Return a client of this server, on its clock; the options are those of `BidiKV`."""
        options.setdefault("http_client", httpx.Client(transport=self.transport()))
        return _FakeBidiKV(self.clock, base_url, api_key or self._api_key, **options)

    def async_client(self, base_url: str = BASE_URL, api_key: str | None = None, **options: Any) -> AsyncBidiKV:
        """Return a client of this server, on its clock; the options are those of `AsyncBidiKV`."""
        options.setdefault("http_client", httpx.AsyncClient(transport=self.async_transport()))
        return _FakeAsyncBidiKV(self.clock, base_url, api_key or self._api_key, **options)

    def transport(self, http: Any = httpx) -> Any:
        """Return a transport for a client of your own; `http` is the module (httpx or httpx2) that it is made with."""
        return transport_of(http, self._handle)

    def async_transport(self, http: Any = httpx) -> Any:
        """Return a transport for an asynchronous client of your own; `http` is the module that it is made with."""
        return transport_of(http, self._handle)

    @contextlib.contextmanager
    def serve(self, port: int = 0) -> Iterator[str]:
        """Serve over HTTP on this machine for the length of a block, for clients that take no transport.

        Yields the base URL, as in `http://127.0.0.1:40123/v1`. Connections that are still open at the end break.

        Args:
            port: 0: a free one.
        """
        with served(self._handle, port) as address:
            yield f"{address}/v1"

    # ---------------------------------------------------------------- script

    def advance(self, seconds: float) -> None:
        """Move the clock on; leases whose time is over expire."""
        self.clock.advance(seconds)

    def reply(
        self,
        text: str | None = None,
        *,
        tool_calls: Sequence[Mapping[str, Any]] = (),
        finish_reason: str | None = None,
        outcome: Outcome | None = None,
        reason: Reason | None = None,
        reasoning: str | None = None,
    ) -> None:
        """Script the answer to a turn or a chat completion; None: what the server would say by itself.

        Args:
            text: The assistant's text. A stream sends it word by word.
            tool_calls: OpenAI tool calls. A stream sends the arguments in two pieces.
            finish_reason: None: `tool_calls` or `stop`.
            outcome: Outcome of the cache report, with token counts that fit.
            reason: Reason of the cache report.
            reasoning: What a reasoning model thinks before it answers.
        """
        self._replies.append(ScriptedReply(text, tool_calls, finish_reason, outcome, reason, reasoning))

    def fail(self, code: ErrorCode, message: str = "scripted", *, on: str | None = None, **fields: Any) -> None:
        """Script an error of the protocol; `on` is a verb, `fields` are those of `wire.ErrorInfo`."""
        info = ErrorInfo(code, message, **fields)
        self._faults.append(_Fault(on, lambda: error_reply(info)))

    def respond(
        self,
        status: int,
        body: object = None,
        headers: Mapping[str, str] | None = None,
        *,
        on: str | None = None,
    ) -> None:
        """Script any reply, as of a proxy or another server; text goes out as it is, all else as JSON."""
        text = body if isinstance(body, str | bytes) else json.dumps(body)
        content = text.encode() if isinstance(text, str) else text
        self._faults.append(_Fault(on, lambda: FakeReply(status, content, dict(headers or {}))))

    def refuse(self, error: Exception | None = None, *, on: str | None = None) -> None:
        """Script a request that never arrives; None: the connection is refused."""

        def respond() -> FakeReply:
            raise error or Broken("ConnectError", "connection refused")

        self._faults.append(_Fault(on, respond))

    def drop(self, *, after_chunks: int = 0, completed: bool = False, on: str | None = "turns") -> None:
        """Script a connection that breaks before the reply, or in a stream after so many chunks.

        Args:
            after_chunks: Chunks that a stream still sends; nothing to a reply without streaming.
            completed: Whether the server completes what was asked all the same.
            on: The verb.
        """
        self._faults.append(_Fault(on, after_chunks=after_chunks, completed=completed))

    def forget(self) -> None:
        """Lose all sessions, as a server that was started again."""
        self._store.sessions.clear()

    def revoke(self, session_id: str, reason: Reason = "lease_revoked") -> None:
        """Take a session's lease back.

        Raises:
            KeyError: there is no such session.
        """
        self._store.drop_lease(self._store.sessions[session_id], "revoked", reason)

    def info(self, session_id: str) -> SessionInfo:
        """Return what the server knows of a session.

        Raises:
            KeyError: there is no such session.
        """
        return self._store.info(self._store.sessions[session_id])

    def messages(self, session_id: str) -> list[Message]:
        """Return a copy of the server's transcript.

        Raises:
            KeyError: there is no such session.
        """
        return copy.deepcopy(self._store.sessions[session_id].messages)

    # ---------------------------------------------------------------- requests

    def _handle(self, request: FakeRequest) -> FakeReply:
        path = unquote(request.path).removeprefix("/v1/").split("/")
        body = json.loads(request.content) if request.content else {}
        verb, session_id = route_of(request, path, body)
        self.requests.append(RecordedRequest(verb, session_id, dict(request.headers), body))
        fault = next((fault for fault in self._faults if fault.verb in {None, verb}), None)
        if fault is not None:
            self._faults.remove(fault)
        if fault is not None and fault.respond is not None:
            reply = fault.respond()
        elif verb not in VERBS:
            reply = json_reply(404, {"detail": "Not Found"})
        else:
            reply = self._answer(request, verb, session_id, body, fault)
        if not any(name.lower() == "x-request-id" for name in reply.headers):
            reply.headers["X-Request-Id"] = request.headers.get("x-request-id") or uuid.uuid4().hex
        return reply

    def _answer(
        self,
        request: FakeRequest,
        verb: str,
        session_id: str | None,
        body: dict[str, Any],
        fault: _Fault | None,
    ) -> FakeReply:
        if fault is not None and not body.get("stream") and not fault.completed:
            raise Broken(*_BROKEN)
        try:
            self._check(request, verb, session_id, body)
            if verb == "turns":
                reply = self._turn(session_id or "", request.headers.get("idempotency-key"), body, fault)
            elif verb == "chat":
                reply = self._chat(session_id, named_parent(body, request.headers), body, fault)
            else:
                reply = json_reply(200, self._control(verb, session_id or "", body, request.query))
        except Refused as refused:
            return error_reply(refused.info)
        if fault is not None and not body.get("stream"):
            raise Broken(*_BROKEN)
        return reply

    def _check(self, request: FakeRequest, verb: str, session_id: str | None, body: dict[str, Any]) -> None:
        if self._api_key is not None and request.headers.get("authorization") != f"Bearer {self._api_key}":
            raise Refused(ErrorInfo("invalid_api_key", "no API key, or an unknown one"))
        if verb in {"chat", "models"}:  # any OpenAI client: it may name a session in one place, or none
            return
        if session_id is not None and request.headers.get("x-session-id") != session_id:
            raise Refused(ErrorInfo("invalid_request", "X-Session-ID must name the session", param="X-Session-ID"))
        if request.method == "POST":
            if body.get("session_id") != session_id:
                raise Refused(ErrorInfo("invalid_request", "session_id must name the session", param="session_id"))
            if body.get("bidikv", {}).get("protocol") != PROTOCOL:
                raise Refused(ErrorInfo("protocol_mismatch", f"this server speaks protocol {PROTOCOL}"))

    def _control(self, verb: str, session_id: str, body: dict[str, Any], query: Mapping[str, str]) -> dict[str, Any]:
        store = self._store
        if verb == "models":
            model = {"id": store.model, "object": "model", "created": 0, "owned_by": "fake"}
            return {"object": "list", "data": [model]}
        if verb == "list":
            return store.page(query)
        if verb == "open":
            return {"bidikv": store.info(store.open(session_id, body)).to_json()}
        session = store.known(session_id)
        if verb == "extend":
            store.extend(session, body.get("ttl_s"))
        elif verb == "fork":
            session = store.fork(session, body)
        elif verb == "rewind":
            session.cut(body.get("turn", -1))
        elif verb in {"release", "end"}:
            store.drop_lease(session, "released", "released")
            if verb == "end":
                del store.sessions[session_id]
        elif verb == "get":
            return {"bidikv": store.shown(session).to_json()}
        return {"bidikv": store.info(session).to_json()}

    def _turn(self, session_id: str, key: str | None, body: dict[str, Any], fault: _Fault | None) -> FakeReply:
        turn = self._store.begin_turn(session_id, key, body, self._take_script)
        if not body.get("stream"):
            return json_reply(200, self._store.complete(turn) if isinstance(turn, FakeTurn) else turn)
        if isinstance(turn, FakeTurn):
            return self._stream(turn, fault)
        return event_reply(map(event_of, (whole_chunk_of(turn), last_chunk_of(turn))))

    def _chat(
        self, session_id: str | None, parent_id: str | None, body: dict[str, Any], fault: _Fault | None
    ) -> FakeReply:
        turn = self._store.begin_chat(session_id, parent_id, body, self._take_script)
        if not body.get("stream"):
            return json_reply(200, self._store.complete(turn))
        return self._stream(turn, fault, wants_usage=bool((body.get("stream_options") or {}).get("include_usage")))

    def _stream(self, turn: FakeTurn, fault: _Fault | None, *, wants_usage: bool = True) -> FakeReply:
        return event_reply(self._events(turn, fault, wants_usage=wants_usage), lambda: self._store.abort(turn))

    def _events(self, turn: FakeTurn, fault: _Fault | None, *, wants_usage: bool) -> Iterator[bytes]:
        *chunks, finish = chunks_of(turn.completion)
        if wants_usage:
            chunks.append(finish)
        for index, chunk in enumerate(chunks):
            if fault is not None and index >= fault.after_chunks:
                break
            yield event_of(chunk)
        if fault is not None:
            if fault.completed:
                self._store.complete(turn)
            raise Broken(*_BROKEN)
        last = last_chunk_of(self._store.complete(turn))
        if not wants_usage:  # what it would carry lies in the chunk that ends the text
            last = {**finish, **{name: last[name] for name in ("system_fingerprint", "bidikv") if name in last}}
        yield event_of(last)
        yield b"data: [DONE]\n\n"

    def _take_script(self) -> ScriptedReply:
        return self._replies.popleft() if self._replies else ScriptedReply()


class _FakeBidiKV(BidiKV):
    def __init__(self, clock: Clock, *args: Any, **options: Any) -> None:
        self._clock = clock
        super().__init__(*args, **options)


class _FakeAsyncBidiKV(AsyncBidiKV):
    def __init__(self, clock: Clock, *args: Any, **options: Any) -> None:
        self._clock = clock
        super().__init__(*args, **options)
