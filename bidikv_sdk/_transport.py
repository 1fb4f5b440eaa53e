"""The only module that knows httpx: sends a `Call`, retries it, returns a `Reply` or raises the SDK's error.

`Transport` and `AsyncTransport` are the two thin drivers; everything that both need lies in `Settings`. They are
written over the module, so that a client of httpx2, which has the same names, can be injected as well.
May import `_retry`, `_requests`, `_errors` and `_clock`.
"""

from __future__ import annotations

import contextlib
import json
import time
import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import httpx

from bidikv_sdk._errors import APIConnectionError, APITimeoutError, ClientClosed, ConfigurationError
from bidikv_sdk._requests import Reply, error_of
from bidikv_sdk._retry import async_retrying, retrying

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator, Mapping

    from bidikv_sdk._clock import Clock
    from bidikv_sdk._requests import Call

HttpClient: TypeAlias = httpx.Client
AsyncHttpClient: TypeAlias = httpx.AsyncClient

# A server that is up accepts at once, however long it then computes.
_CONNECT_TIMEOUT_S: Final = 5.0
_FIRST_ERROR_STATUS: Final = 400
_NEVER_ARRIVED: Final = ("ConnectError", "ConnectTimeout", "PoolTimeout")


# vLLM closes idle connections after 5 s: one that it is just closing would cost a failed call and a retry.
_LIMITS = httpx.Limits(max_connections=100, max_keepalive_connections=20, keepalive_expiry=3.0)


@dataclass(frozen=True, slots=True)
class OpenReply(Reply):
    """A reply whose body is still arriving."""

    response: httpx.Response

    def chunks(self) -> Iterator[bytes]:
        """Yield the body's pieces as they arrive.

        Raises:
            APIConnectionError: the connection broke.
        """
        with _translated(self.request_id):
            yield from self.response.iter_bytes()

    async def chunks_async(self) -> AsyncIterator[bytes]:
        """Yield the body's pieces as they arrive.

        Raises:
            APIConnectionError: the connection broke.
        """
        with _translated(self.request_id):
            async for data in self.response.aiter_bytes():
                yield data

    def close(self) -> None:
        """Drop the connection; the server sees that the client has gone."""
        self.response.close()

    async def close_async(self) -> None:
        """Drop the connection; the server sees that the client has gone."""
        await self.response.aclose()


@dataclass(frozen=True, slots=True)
class Settings:
    """What the two transports share: where to send, and how long to wait."""

    base_url: str
    api_key: str | None
    timeout_s: float | None
    max_retries: int
    default_headers: Mapping[str, str]
    clock: Clock
    module: Any = httpx
    """Of the HTTP client: httpx or httpx2."""

    def __post_init__(self) -> None:
        """Refuse a base URL that no request could be sent to."""
        if not self.base_url.startswith(("http://", "https://")):
            msg = f"base URL {self.base_url!r} must start with http:// or https://, as in http://127.0.0.1:8200/v1"
            raise ConfigurationError(msg)

    def retries_of(self, call: Call) -> int:
        """Return how often a call may be repeated."""
        return self.max_retries if call.max_retries is None else call.max_retries

    def request_of(self, call: Call) -> dict[str, Any]:
        """Return the arguments of httpx's `build_request`; each try has an id of its own."""
        headers = {"User-Agent": "bidikv-sdk", "X-Request-Id": uuid.uuid4().hex}
        if self.api_key:
            headers["Authorization"] = f"Bearer {self.api_key}"
        headers |= self.default_headers
        headers |= call.headers
        content = None
        if call.body is not None:
            headers["Content-Type"] = "application/json"
            # One NaN would make the whole body unreadable to the server: better a ValueError here.
            content = json.dumps(call.body, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()
        timeout_s = self.timeout_s if call.timeout_s is None else call.timeout_s
        connect_s = _CONNECT_TIMEOUT_S if timeout_s is None else min(_CONNECT_TIMEOUT_S, timeout_s)
        return {
            "method": call.method,
            "url": f"{self.base_url.rstrip('/')}/{call.path}",
            "headers": headers,
            "content": content,
            "timeout": self.module.Timeout(timeout_s, connect=connect_s),
        }


class Transport:
    """Sends calls over an `httpx.Client`, an injected one (never closed here) or its own."""

    def __init__(self, settings: Settings, http_client: HttpClient | None) -> None:
        self._settings = settings
        self._owned = http_client is None
        self._http = http_client or httpx.Client(limits=_LIMITS)
        self._closed = False

    def send(self, call: Call) -> Reply:
        """Send a call, again where that is safe and can help; a streaming call returns an `OpenReply`.

        Raises:
            ClientClosed: `close` was called before.
            APIConnectionError: no reply came.
            APIStatusError: the reply is an error.
        """
        _check_open(self._closed)
        retry = retrying(self._settings.retries_of(call), self._settings.clock.sleep)
        return retry(self._send_once, call)

    def close(self) -> None:
        """Close the connections, unless the `httpx.Client` was injected."""
        self._closed = True
        if self._owned:
            self._http.close()

    def _send_once(self, call: Call) -> Reply:
        request = self._http.build_request(**self._settings.request_of(call))
        with _translated(request.headers["X-Request-Id"], self._settings.module):
            response = self._http.send(request, stream=True)
            if call.stream and response.status_code < _FIRST_ERROR_STATUS:
                return OpenReply(dict(response.headers), b"", response)
            try:
                response.read()
            finally:
                response.close()
        return _reply_of(response)


class AsyncTransport:
    """Sends calls over an `httpx.AsyncClient`, an injected one (never closed here) or its own."""

    def __init__(self, settings: Settings, http_client: AsyncHttpClient | None) -> None:
        self._settings = settings
        self._owned = http_client is None
        self._http = http_client or httpx.AsyncClient(limits=_LIMITS)
        self._closed = False

    async def send(self, call: Call) -> Reply:
        """Send a call, again where that is safe and can help; a streaming call returns an `OpenReply`.

        Raises:
            ClientClosed: `close` was called before.
            APIConnectionError: no reply came.
            APIStatusError: the reply is an error.
        """
        _check_open(self._closed)
        retry = async_retrying(self._settings.retries_of(call), self._settings.clock.sleep_async)
        return await retry(self._send_once, call)

    async def close(self) -> None:
        """Close the connections, unless the `httpx.AsyncClient` was injected."""
        self._closed = True
        if self._owned:
            await self._http.aclose()

    async def _send_once(self, call: Call) -> Reply:
        request = self._http.build_request(**self._settings.request_of(call))
        with _translated(request.headers["X-Request-Id"], self._settings.module):
            response = await self._http.send(request, stream=True)
            if call.stream and response.status_code < _FIRST_ERROR_STATUS:
                return OpenReply(dict(response.headers), b"", response)
            try:
                await response.aread()
            finally:
                await response.aclose()
        return _reply_of(response)


def _check_open(closed: bool) -> None:  # noqa: FBT001 - one flag, one meaning
    if closed:
        msg = "this client was closed; make a new one"
        raise ClientClosed(msg)


def _reply_of(response: httpx.Response) -> Reply:
    headers = dict(response.headers)
    if response.status_code >= _FIRST_ERROR_STATUS:
        raise error_of(response.status_code, headers, response.content, time.time())
    return Reply(headers, response.content)


@contextlib.contextmanager
def _translated(request_id: str | None, module: Any = httpx) -> Iterator[None]:
    """Turn the errors of httpx, or of a module like it, into the SDK's."""
    try:
        yield
    except module.RequestError as error:
        error_class = APITimeoutError if isinstance(error, module.TimeoutException) else APIConnectionError
        arrived = not any(isinstance(error, getattr(module, name)) for name in _NEVER_ARRIVED)
        url = error.request.url
        message = f"{type(error).__name__} at {url.netloc.decode()}{url.path}: {error}"
        raise error_class(message, request_id=request_id, may_have_arrived=arrived) from error
