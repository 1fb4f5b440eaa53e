"""Makes stock OpenAI clients session-aware: a transport below their HTTP client, and a variable that names the session.

    client = openai.OpenAI(base_url=url, http_client=httpx2.Client(transport=session_transport(httpx2)))
    with current_session("s1") as session:
        client.chat.completions.create(...)  # as always: the whole history
        with session.hold():
            run_tool()

A request runs `mark` → the inner transport → `watch`, which sees the reply's report pass by. Written over the HTTP
module, which is passed in: httpx and httpx2 have the same names. No control call of ours ever fails the caller's
completion. May import `_current`, and imports no HTTP library itself.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar, cast

from bidikv_sdk._clock import Clock
from bidikv_sdk._current import CurrentSession, Server, active_session
from bidikv_sdk._stream import EventDecoder

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

_SyncT_co = TypeVar("_SyncT_co", covariant=True)
_AsyncT_co = TypeVar("_AsyncT_co", covariant=True)

# What a session can serve, and where the base URL of its server ends before it.
_ROUTES: Final = {"/chat/completions": "/chat/completions", "/v1/messages": "/messages"}
# It says who calls, and so whose the session is.
_KEY_HEADER: Final = "Authorization"
_REPLACED_HEADERS: Final = frozenset({"content-length", "transfer-encoding"})
# As many as OpenAI's own client opens. vLLM closes idle connections after 5 s: better to be first.
_LIMITS: Final = {"max_connections": 1000, "max_keepalive_connections": 100, "keepalive_expiry": 3.0}


class _SyncModule(Protocol[_SyncT_co]):
    """What `session_transport` needs of httpx and httpx2, for type checkers."""

    @property
    def BaseTransport(self) -> type[_SyncT_co]: ...  # noqa: N802 - httpx's name


class _AsyncModule(Protocol[_AsyncT_co]):
    """What `async_session_transport` needs of httpx and httpx2, for type checkers."""

    @property
    def AsyncBaseTransport(self) -> type[_AsyncT_co]: ...  # noqa: N802 - httpx's name


def session_transport(
    http: _SyncModule[_SyncT_co], inner: _SyncT_co | None = None, *, clock: Clock | None = None
) -> _SyncT_co:
    """Return a transport that sends the chat completions of the current session (`current_session`) as such.

    Without a current session every request passes unchanged, and so does one that names its session itself.

    Args:
        http: The module `httpx2` (openai 3, anthropic 2) or `httpx` (openai 2), whichever the client is made with.
        inner: Sends the requests, as a proxy's `HTTPTransport`; None: a plain one.
        clock: Of `hold()`; None: real time. Tests give the one of `testing.FakeServer`.
    """
    module = cast("Any", http)
    inner = module.HTTPTransport(limits=module.Limits(**_LIMITS)) if inner is None else inner
    kind = type("SessionTransport", (_SessionTransport, module.BaseTransport), {})
    return cast("_SyncT_co", kind(module, inner, clock))


def async_session_transport(
    http: _AsyncModule[_AsyncT_co], inner: _AsyncT_co | None = None, *, clock: Clock | None = None
) -> _AsyncT_co:
    """Return a transport that sends the chat completions of the current session (`current_session`) as such.

    Without a current session every request passes unchanged, and so does one that names its session itself.

    Args:
        http: The module `httpx2` (openai 3, anthropic 2) or `httpx` (openai 2), whichever the client is made with.
        inner: Sends the requests, as a proxy's `AsyncHTTPTransport`; None: a plain one.
        clock: Of `hold()`; None: real time. Tests give the one of `testing.FakeServer`.
    """
    module = cast("Any", http)
    inner = module.AsyncHTTPTransport(limits=module.Limits(**_LIMITS)) if inner is None else inner
    kind = type("AsyncSessionTransport", (_AsyncSessionTransport, module.AsyncBaseTransport), {})
    return cast("_AsyncT_co", kind(module, inner, clock))


class _Marking:
    """What both transports share."""

    def __init__(self, module: Any, inner: Any, clock: Clock | None) -> None:
        self._module = module
        self._inner = inner
        self._clock = clock or Clock()
        self._stream_kind = type("_Watched", (_Watched, module.SyncByteStream, module.AsyncByteStream), {})

    def _session_of(self, request: Any) -> CurrentSession | None:
        """Return the session that a request is to be sent in."""
        session = active_session()
        is_served = request.method == "POST" and request.url.path.endswith(tuple(_ROUTES))
        return session if is_served and "content-encoding" not in request.headers else None

    def _mark(self, request: Any, session: CurrentSession) -> Any:
        """Return the request with the session's id in it, or itself where that cannot be; its body has been read."""
        if "x-session-id" in request.headers or (content := _with_fields(request.content, session.fields)) is None:
            return request
        headers = [(k, v) for k, v in request.headers.raw if k.decode().lower() not in _REPLACED_HEADERS]
        headers += [(k.encode(), v.encode()) for k, v in session.headers.items()]
        marked = self._module.Request(
            request.method, request.url, headers=headers, content=content, extensions=request.extensions
        )
        url = str(request.url).partition("?")[0]
        base_url = next(url.removesuffix(rest) for route, rest in _ROUTES.items() if url.endswith(route))
        keys = {_KEY_HEADER: request.headers[_KEY_HEADER]} if _KEY_HEADER in request.headers else {}
        session.sent_to(Server(self._module, self._inner, base_url, keys, self._clock))
        return marked

    def _watch(self, response: Any, session: CurrentSession) -> Any:
        """Return the response, its body seen as it passes."""
        if response.headers.get("content-encoding", "identity") == "identity":
            is_stream = response.headers.get("content-type", "").startswith("text/event-stream")
            watched = self._stream_kind(response.stream, session, is_stream=is_stream)
            try:
                watched.see(response.content)  # an inner transport may have read it, as those of tests do
                watched.tell()
            except self._module.ResponseNotRead:
                response.stream = watched
        return response


class _SessionTransport(_Marking):
    def handle_request(self, request: Any) -> Any:
        session = self._session_of(request)
        if session is None:
            return self._inner.handle_request(request)
        request.read()
        marked = self._mark(request, session)
        response = self._inner.handle_request(marked)
        return response if marked is request else self._watch(response, session)

    def close(self) -> None:
        self._inner.close()


class _AsyncSessionTransport(_Marking):
    async def handle_async_request(self, request: Any) -> Any:
        session = self._session_of(request)
        if session is None:
            return await self._inner.handle_async_request(request)
        await request.aread()
        marked = self._mark(request, session)
        response = await self._inner.handle_async_request(marked)
        return response if marked is request else self._watch(response, session)

    async def aclose(self) -> None:
        await self._inner.aclose()


class _Watched:
    """A reply's body that passes through; what it reports is told to the session when it has passed."""

    def __init__(self, stream: Any, session: CurrentSession, *, is_stream: bool) -> None:
        self._stream = stream
        self._session = session
        self._events = EventDecoder() if is_stream else None
        self._kept: list[bytes] = []

    def __iter__(self) -> Iterator[bytes]:
        for data in self._stream:
            self.see(data)
            yield data
        self.tell()

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for data in self._stream:
            self.see(data)
            yield data
        self.tell()

    def close(self) -> None:
        self._stream.close()

    async def aclose(self) -> None:
        await self._stream.aclose()

    def see(self, data: bytes) -> None:
        """Take the next bytes."""
        if self._events is None:
            self._kept.append(data)
            return
        # Of a stream only the event with the report is kept; it is told at once: clients stop reading at `[DONE]`.
        for event in self._events.feed(data):
            if b'"bidikv"' in event:
                self._kept = [event]
                self.tell()

    def tell(self) -> None:
        """Tell the session what they report."""
        self._session.answered(b"".join(self._kept))


def _with_fields(content: bytes, fields: dict[str, Any]) -> bytes | None:
    """Return a JSON object with more fields, all else byte for byte; None where it is none, or names its session."""
    try:
        body = json.loads(content)
    except ValueError:
        return None
    start = content.find(b"{")
    # UTF-16 is JSON too, but nothing to splice into.
    if not isinstance(body, dict) or "session_id" in body or content[:start].strip():
        return None
    new = {name: value for name, value in fields.items() if name not in body}
    head = json.dumps(new, separators=(",", ":")).encode()[1:-1]
    return content[: start + 1] + head + (b"," if body else b"") + content[start + 1 :]
