"""How requests reach a fake server: over the transports of an HTTP module (httpx or httpx2), or over a real socket.

Both hand a `FakeRequest` to `answer(request) -> FakeReply`. May import the standard library only; the HTTP module is
passed in.
"""

from __future__ import annotations

import contextlib
import json
import sys
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any, Final, TypeAlias
from urllib.parse import parse_qsl

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator, Mapping

    from bidikv_sdk.wire import ErrorInfo

VERBS: Final = frozenset(
    {"open", "list", "get", "turns", "extend", "release", "fork", "rewind", "end", "chat", "models"}
)
_LONGEST_ID: Final = 256


@dataclass(frozen=True, slots=True)
class FakeRequest:
    """A request; `headers` by lower-case names, `path` still quoted and without its query."""

    method: str
    path: str
    headers: Mapping[str, str]
    content: bytes
    query: Mapping[str, str]


@dataclass(slots=True)
class FakeReply:
    """A reply; `events` in the place of `content` are made while they are read, and `on_close` tells that they were."""

    status: int
    content: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)
    events: Iterator[bytes] | None = None
    on_close: Callable[[], None] = lambda: None


Answer: TypeAlias = "Callable[[FakeRequest], FakeReply]"


class Broken(Exception):
    """The connection breaks; `kind` is the name of httpx's error."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


def json_reply(status: int, data: object) -> FakeReply:
    """Return a reply with a JSON body."""
    content = json.dumps(data, ensure_ascii=False).encode()
    return FakeReply(status, content, {"Content-Type": "application/json"})


def event_of(data: Mapping[str, Any]) -> bytes:
    """Return a server-sent event."""
    return b"data: " + json.dumps(data, ensure_ascii=False).encode() + b"\n\n"


def event_reply(events: Iterator[bytes], on_close: Callable[[], None] = lambda: None) -> FakeReply:
    """Return a reply that is a stream of events."""
    return FakeReply(200, headers={"Content-Type": "text/event-stream"}, events=iter(events), on_close=on_close)


def error_reply(info: ErrorInfo) -> FakeReply:
    """Return an error of the protocol."""
    return json_reply(info.status, {"error": info.to_json()})


# ---------------------------------------------------------------- what a request asks for


def named_session(body: Mapping[str, Any], headers: Mapping[str, str]) -> str | None:
    """Return the session that a completion names; `headers` by lower-case names."""
    extra = body.get("vllm_xargs")
    named = body.get("session_id") or headers.get("x-session-id")
    named = named or (extra.get("session_id") if isinstance(extra, dict) else None)
    return named if isinstance(named, str) and 0 < len(named) <= _LONGEST_ID else None


def named_parent(body: Mapping[str, Any], headers: Mapping[str, str]) -> str | None:
    """Return the session that the one of a completion branches off."""
    named = body.get("parent_session_id") or headers.get("x-parent-session-id")
    return named if isinstance(named, str) else None


def route_of(request: FakeRequest, path: list[str], body: Mapping[str, Any]) -> tuple[str, str | None]:
    """Return the verb of a request, and the session that it is about."""
    if path == ["chat", "completions"] and request.method == "POST":
        return "chat", named_session(body, request.headers)
    if path == ["models"] and request.method == "GET":
        return "models", None
    if path == ["sessions"]:
        return ("open", body.get("session_id")) if request.method == "POST" else ("list", None)
    if path[0] != "sessions":
        return request.path, None
    by_method = {"GET": "get", "DELETE": "end"}
    return (path[2] if len(path) > 2 else by_method.get(request.method, request.method)), path[1]  # noqa: PLR2004


# ---------------------------------------------------------------- an HTTP module's transport


def transport_of(module: Any, answer: Answer) -> Any:
    """Return a transport of an HTTP module, for its synchronous and its asynchronous client."""
    stream_kind = type("EventStream", (_EventStream, module.SyncByteStream, module.AsyncByteStream), {})

    def handle(request: Any) -> Any:
        path, _, query = request.url.raw_path.decode().partition("?")
        headers = {name.lower(): value for name, value in request.headers.items()}
        with _as_errors_of(module):
            reply = answer(FakeRequest(request.method, path, headers, request.content, dict(parse_qsl(query))))
        if reply.events is None:
            return module.Response(reply.status, content=reply.content, headers=reply.headers)
        return module.Response(reply.status, headers=reply.headers, stream=stream_kind(module, reply))

    return module.MockTransport(handle)


class _EventStream:
    """A body that is made while it is read, and tells when it was left."""

    def __init__(self, module: Any, reply: FakeReply) -> None:
        self._module = module
        self._reply = reply

    def __iter__(self) -> Iterator[bytes]:
        with _as_errors_of(self._module):
            yield from self._reply.events or ()

    async def __aiter__(self) -> AsyncIterator[bytes]:
        with _as_errors_of(self._module):
            for event in self._reply.events or ():
                yield event

    def close(self) -> None:
        self._reply.on_close()

    async def aclose(self) -> None:
        self._reply.on_close()


@contextlib.contextmanager
def _as_errors_of(module: Any) -> Iterator[None]:
    try:
        yield
    except Broken as broken:
        raise getattr(module, broken.kind)(str(broken)) from None


# ---------------------------------------------------------------- a real socket


@contextlib.contextmanager
def served(answer: Answer, port: int) -> Iterator[str]:
    """Serve on the loopback interface for the length of a block; yields the address, without a path."""
    lock = threading.Lock()  # connections are threads, and what they share is not made for them

    class Handler(_Handler):
        def answered(self, request: FakeRequest) -> FakeReply:
            with lock:
                return answer(request)

        def following(self, events: Iterator[bytes]) -> bytes | None:
            with lock:
                return next(events, None)

        def left(self, reply: FakeReply) -> None:
            with lock:
                reply.on_close()

    server = _Server(("127.0.0.1", port), Handler)
    server.daemon_threads = True
    server.block_on_close = False  # a connection that a client keeps open is no reason to wait
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Server(ThreadingHTTPServer):
    def handle_error(self, request: Any, client_address: Any) -> None:
        # A client that hangs up, as most do when their process ends, is nothing to print.
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # else a small reply waits 40 ms for the client's acknowledgement

    def answered(self, request: FakeRequest) -> FakeReply:
        raise NotImplementedError

    def following(self, events: Iterator[bytes]) -> bytes | None:
        raise NotImplementedError

    def left(self, reply: FakeReply) -> None:
        raise NotImplementedError

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - http.server's name
        """Print nothing."""

    def _serve(self) -> None:
        content = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        headers = {name.lower(): value for name, value in self.headers.items()}
        path, _, query = self.path.partition("?")
        request = FakeRequest(self.command, path, headers, content, dict(parse_qsl(query)))
        try:
            reply = self.answered(request)
        except Exception:  # noqa: BLE001 - a scripted break, or an error that a test gave: the client sees no reply
            self.close_connection = True
            return
        self.send_response(reply.status)
        for name, value in reply.headers.items():
            self.send_header(name, value)
        if reply.events is None:
            self.send_header("Content-Length", str(len(reply.content)))
            self.end_headers()
            self.wfile.write(reply.content)
        else:
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            self._stream(reply, reply.events)

    def _stream(self, reply: FakeReply, events: Iterator[bytes]) -> None:
        try:
            while (event := self.following(events)) is not None:
                self.wfile.write(b"%x\r\n%b\r\n" % (len(event), event))
            self.wfile.write(b"0\r\n\r\n")
        except (Broken, OSError):  # scripted, or the client has left
            self.close_connection = True
        finally:
            self.left(reply)

    do_GET = do_POST = do_DELETE = _serve  # noqa: N815 - http.server's names
