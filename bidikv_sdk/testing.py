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
from bidikv_sdk._fake import (
    FakeStore,
    FakeTurn,
    Refused,
    ScriptedReply,
    chunks_of,
    last_chunk_of,
    whole_chunk_of,
)
from bidikv_sdk.wire import PROTOCOL, ErrorInfo, sessions_to_json

if TYPE_CHECKING:
    import asyncio
    import threading
    from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence

    from bidikv_sdk._types import Message
    from bidikv_sdk.wire import ErrorCode, Outcome, Reason, SessionInfo

__all__ = ["FakeServer", "ManualClock", "RecordedRequest"]

BASE_URL: Final = "http://fake.bidikv/v1"
_VERBS: Final = frozenset({"open", "list", "get", "turns", "extend", "release", "fork", "rewind", "end"})
_BROKEN: Final = "scripted: the connection broke"
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
    """`open`, `list`, `get`, `turns`, `extend`, `release`, `fork`, `rewind` or `end`; else the path."""
    session_id: str | None
    headers: Mapping[str, str]
    """Names in lower case."""
    body: dict[str, Any]


@dataclass(slots=True)
class _Fault:
    verb: str | None
    respond: Callable[[httpx.Request], httpx.Response] | None = None
    after_chunks: int = 0
    completed: bool = False


class _EventStream(httpx.SyncByteStream, httpx.AsyncByteStream):
    """A body that is made while it is read, and tells when it was left."""

    def __init__(self, events: Iterator[bytes], on_close: Callable[[], None]) -> None:
        self._events = events
        self._on_close = on_close

    def __iter__(self) -> Iterator[bytes]:
        yield from self._events

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for event in self._events:
            yield event

    def close(self) -> None:
        self._on_close()

    async def aclose(self) -> None:
        self._on_close()


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

    def transport(self) -> httpx.BaseTransport:
        """Return a transport for an `httpx.Client` of your own."""
        return httpx.MockTransport(self._handle)

    def async_transport(self) -> httpx.AsyncBaseTransport:
        """Return a transport for an `httpx.AsyncClient` of your own."""
        return httpx.MockTransport(self._handle)

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
    ) -> None:
        """Script the answer to a turn; None: what the server would say by itself.

        Args:
            text: The assistant's text. A stream sends it word by word.
            tool_calls: OpenAI tool calls. A stream sends the arguments in two pieces.
            finish_reason: None: `tool_calls` or `stop`.
            outcome: Outcome of the cache report, with token counts that fit.
            reason: Reason of the cache report.
        """
        self._replies.append(ScriptedReply(text, tool_calls, finish_reason, outcome, reason))

    def fail(self, code: ErrorCode, message: str = "scripted", *, on: str | None = None, **fields: Any) -> None:
        """Script an error of the protocol; `on` is a verb, `fields` are those of `wire.ErrorInfo`."""
        info = ErrorInfo(code, message, **fields)
        self._faults.append(_Fault(on, lambda _: _error_response(info)))

    def respond(
        self,
        status: int,
        body: object = None,
        headers: Mapping[str, str] | None = None,
        *,
        on: str | None = None,
    ) -> None:
        """Script any reply, as of a proxy or another server; text goes out as it is, all else as JSON."""
        content = body if isinstance(body, str | bytes) else json.dumps(body)
        self._faults.append(_Fault(on, lambda _: httpx.Response(status, content=content, headers=headers)))

    def refuse(self, error: Exception | None = None, *, on: str | None = None) -> None:
        """Script a request that never arrives; None: the connection is refused."""

        def respond(_: httpx.Request) -> httpx.Response:
            raise error or httpx.ConnectError("connection refused")

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

    def _handle(self, request: httpx.Request) -> httpx.Response:
        path = unquote(request.url.raw_path.decode()).removeprefix("/v1/").split("/")
        body = json.loads(request.content) if request.content else {}
        verb, session_id = _route(request.method, path, body)
        self.requests.append(RecordedRequest(verb, session_id, dict(request.headers), body))
        fault = next((fault for fault in self._faults if fault.verb in {None, verb}), None)
        if fault is not None:
            self._faults.remove(fault)
        if fault is not None and fault.respond is not None:
            response = fault.respond(request)
        elif verb not in _VERBS:
            response = httpx.Response(404, json={"detail": "Not Found"})
        else:
            response = self._answer(request, verb, session_id, body, fault)
        response.headers.setdefault("X-Request-Id", request.headers.get("X-Request-Id", uuid.uuid4().hex))
        return response

    def _answer(
        self,
        request: httpx.Request,
        verb: str,
        session_id: str | None,
        body: dict[str, Any],
        fault: _Fault | None,
    ) -> httpx.Response:
        if fault is not None and not body.get("stream") and not fault.completed:
            raise httpx.ReadError(_BROKEN)
        try:
            self._check(request, session_id, body)
            if verb == "turns":
                response = self._turn(session_id or "", request.headers.get("Idempotency-Key"), body, fault)
            else:
                response = httpx.Response(200, json=self._control(verb, session_id or "", body))
        except Refused as refused:
            return _error_response(refused.info)
        if fault is not None and not body.get("stream"):
            raise httpx.ReadError(_BROKEN)
        return response

    def _check(self, request: httpx.Request, session_id: str | None, body: dict[str, Any]) -> None:
        if self._api_key is not None and request.headers.get("Authorization") != f"Bearer {self._api_key}":
            raise Refused(ErrorInfo("invalid_api_key", "no API key, or an unknown one"))
        if session_id is not None and request.headers.get("X-Session-ID") != session_id:
            raise Refused(ErrorInfo("invalid_request", "X-Session-ID must name the session", param="X-Session-ID"))
        if request.method == "POST":
            if body.get("session_id") != session_id:
                raise Refused(ErrorInfo("invalid_request", "session_id must name the session", param="session_id"))
            if body.get("bidikv", {}).get("protocol") != PROTOCOL:
                raise Refused(ErrorInfo("protocol_mismatch", f"this server speaks protocol {PROTOCOL}"))

    def _control(self, verb: str, session_id: str, body: dict[str, Any]) -> dict[str, Any]:
        store = self._store
        if verb == "list":
            return sessions_to_json(store.shown(store.known(known_id)) for known_id in store.sessions)
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

    def _turn(self, session_id: str, key: str | None, body: dict[str, Any], fault: _Fault | None) -> httpx.Response:
        turn = self._store.begin_turn(session_id, key, body, self._take_script)
        if not body.get("stream"):
            return httpx.Response(200, json=self._store.complete(turn) if isinstance(turn, FakeTurn) else turn)
        if isinstance(turn, FakeTurn):
            stream = _EventStream(self._events(turn, fault), lambda: self._store.abort(turn))
        else:
            stream = _EventStream(map(_event, (whole_chunk_of(turn), last_chunk_of(turn))), lambda: None)
        return httpx.Response(200, headers={"Content-Type": "text/event-stream"}, stream=stream)

    def _events(self, turn: FakeTurn, fault: _Fault | None) -> Iterator[bytes]:
        for index, chunk in enumerate(chunks_of(turn.completion)):
            if fault is not None and index >= fault.after_chunks:
                break
            yield _event(chunk)
        if fault is not None:
            if fault.completed:
                self._store.complete(turn)
            raise httpx.ReadError(_BROKEN)
        yield _event(last_chunk_of(self._store.complete(turn)))
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


def _route(method: str, path: list[str], body: Mapping[str, Any]) -> tuple[str, str | None]:
    """Return the verb of a request, and the session that it is about."""
    if path == ["sessions"]:
        return ("open", body.get("session_id")) if method == "POST" else ("list", None)
    if path[0] != "sessions":
        return "/".join(path), None
    by_method = {"GET": "get", "DELETE": "end"}
    return (path[2] if len(path) > 2 else by_method.get(method, method)), path[1]  # noqa: PLR2004


def _event(data: Mapping[str, Any]) -> bytes:
    return b"data: " + json.dumps(data, ensure_ascii=False).encode() + b"\n\n"


def _error_response(info: ErrorInfo) -> httpx.Response:
    return httpx.Response(info.status, json={"error": info.to_json()})
