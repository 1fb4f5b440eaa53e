"""`BidiKV` and `AsyncBidiKV`: where the server is, and the way to sessions.

    client = BidiKV("http://127.0.0.1:8200/v1")
    with client.session(system="You are terse.") as session:
        turn = session.send("List the files.")
        with session.hold():
            output = run_tool(turn)
        turn = session.send(output)

May import every other module of the package but `testing`.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Final, cast

from bidikv_sdk._clock import Clock
from bidikv_sdk._errors import ConfigurationError
from bidikv_sdk._requests import pages
from bidikv_sdk._session import AsyncSession, Session
from bidikv_sdk._state import SessionState
from bidikv_sdk._transport import AsyncTransport, Settings, Transport

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from typing_extensions import Self

    from bidikv_sdk._transport import AsyncHttpClient, HttpClient
    from bidikv_sdk._types import Message, Tool
    from bidikv_sdk.wire import Route, SessionInfo

_TIMEOUT_S: Final = 600.0
_MAX_RETRIES: Final = 2


class _BaseClient:
    """What both clients share: settings, and the state of a new session."""

    _model: str | None
    _clock = Clock()
    """Real time; `bidikv_sdk.testing` puts its own here."""

    def _settings(
        self,
        base_url: str | None,
        api_key: str | None,
        timeout_s: float | None,
        max_retries: int,
        default_headers: Mapping[str, str] | None,
    ) -> Settings:
        base_url = base_url or os.environ.get("BIDIKV_BASE_URL") or None
        if base_url is None:
            msg = "no server: pass base_url, or set BIDIKV_BASE_URL, as in http://127.0.0.1:8200/v1"
            raise ConfigurationError(msg)
        api_key = api_key or os.environ.get("BIDIKV_API_KEY") or None
        return Settings(base_url, api_key, timeout_s, max_retries, dict(default_headers or {}), self._clock)

    def _state(
        self,
        session_id: str | None,
        system: str | None,
        tools: Sequence[Tool] | None,
        model: str | None,
        route: Route | None,
        ttl_s: float | None,
        parameters: Mapping[str, Any],
    ) -> SessionState:
        return SessionState(
            session_id,
            system=system,
            tools=tools,
            route=route,
            ttl_s=ttl_s,
            parameters={"model": model or self._model, **parameters},
        )


class BidiKV(_BaseClient):
    """A client of a bidikv server; a context manager that closes its connections.

    Args:
        base_url: Where the server's routes begin, as in `http://127.0.0.1:8200/v1`.
            None: `BIDIKV_BASE_URL`.
        api_key: Sent as a bearer token. None: `BIDIKV_API_KEY`, else none is sent.
        timeout: Seconds to wait for the next byte (connecting: at most 5 s); None: no limit.
        max_retries: How often a request that failed for a passing reason is repeated.
        default_headers: Headers of every request.
        http_client: An `httpx.Client` to send with, as with proxies of its own; it is not closed here.
        model: Model of every session that names none; None: the server's only one.

    Raises:
        ConfigurationError: there is no base URL, or it has no scheme.
    """

    def __init__(
        self,
        base_url: str | None = None,
        api_key: str | None = None,
        *,
        timeout: float | None = _TIMEOUT_S,
        max_retries: int = _MAX_RETRIES,
        default_headers: Mapping[str, str] | None = None,
        http_client: HttpClient | None = None,
        model: str | None = None,
    ) -> None:
        settings = self._settings(base_url, api_key, timeout, max_retries, default_headers)
        self._transport = Transport(settings, http_client)
        self._model = model

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def session(
        self,
        session_id: str | None = None,
        *,
        system: str | None = None,
        tools: Sequence[Tool] | None = None,
        model: str | None = None,
        route: Route | None = None,
        ttl_s: float | None = None,
        **default_chat_parameters: Any,
    ) -> Session:
        """Return a new session; the server learns of it with the first turn.

        Args:
            session_id: None: 128 random bits, which nobody can guess.
            system: The system prompt.
            tools: OpenAI tool definitions.
            model: None: the client's.
            route: How prompts get their cache; None: the server decides.
            ttl_s: Seconds that a lease lives after a turn or a renewal; None: the server's default.
            **default_chat_parameters: OpenAI chat parameters of every turn, such as `temperature`.

        Raises:
            TypeError: a parameter is one that the SDK sets itself.
            ValueError: the id cannot travel in a header.
        """
        state = self._state(session_id, system, tools, model, route, ttl_s, default_chat_parameters)
        return Session(state, self._transport, self._clock)

    def resume(
        self,
        session_id: str,
        transcript: Sequence[Message],
        *,
        turn: int | None = None,
        tools: Sequence[Tool] | None = None,
        model: str | None = None,
        route: Route | None = None,
        ttl_s: float | None = None,
        **default_chat_parameters: Any,
    ) -> Session:
        """Return a session that began elsewhere, as in another process; nothing is sent before its next turn.

        Where the server still has it, that turn uses its cache; else it is opened again from the transcript.

        Args:
            session_id: Its id.
            transcript: All its messages, as `Session.transcript` gives them.
            turn: Completed turns in it; None: one for each assistant message.
            tools: OpenAI tool definitions, as they were.
            model: None: the client's.
            route: How prompts get their cache; None: the server decides.
            ttl_s: Seconds that a lease lives after a turn or a renewal; None: the server's default.
            **default_chat_parameters: OpenAI chat parameters of every turn, such as `temperature`.

        Raises:
            TypeError: a parameter is one that the SDK sets itself, or an item of the transcript is no message.
            ValueError: the id cannot travel in a header, or there are fewer assistant messages than turns.
        """
        state = self._state(session_id, None, tools, model, route, ttl_s, default_chat_parameters)
        state.resume(transcript, turn)
        return Session(state, self._transport, self._clock)

    def sessions(self) -> list[SessionInfo]:
        """Return the caller's sessions on the server, however many requests that takes.

        Raises:
            APIConnectionError: the server cannot be reached.
            APIStatusError: the server refuses.
        """
        calls = pages()
        try:
            call = next(calls)
            while True:
                call = calls.send(self._transport.send(call))
        except StopIteration as stop:
            return cast("list[SessionInfo]", stop.value)

    def close(self) -> None:
        """Close the connections, unless the HTTP client was injected; sessions live on."""
        self._transport.close()


class AsyncBidiKV(_BaseClient):
    """A client of a bidikv server; a context manager that closes its connections.

    Args:
        base_url: Where the server's routes begin, as in `http://127.0.0.1:8200/v1`.
            None: `BIDIKV_BASE_URL`.
        api_key: Sent as a bearer token. None: `BIDIKV_API_KEY`, else none is sent.
        timeout: Seconds to wait for the next byte (connecting: at most 5 s); None: no limit.
        max_retries: How often a request that failed for a passing reason is repeated.
        default_headers: Headers of every request.
        http_client: An `httpx.AsyncClient` to send with, as with proxies of its own; it is not closed here.
        model: Model of every session that names none; None: the server's only one.

    Raises:
        ConfigurationError: there is no base URL, or it has no scheme.
    """

    def __init__(
        self,
        base_url: str | None = None,
        api_key: str | None = None,
        *,
        timeout: float | None = _TIMEOUT_S,
        max_retries: int = _MAX_RETRIES,
        default_headers: Mapping[str, str] | None = None,
        http_client: AsyncHttpClient | None = None,
        model: str | None = None,
    ) -> None:
        settings = self._settings(base_url, api_key, timeout, max_retries, default_headers)
        self._transport = AsyncTransport(settings, http_client)
        self._model = model

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    def session(
        self,
        session_id: str | None = None,
        *,
        system: str | None = None,
        tools: Sequence[Tool] | None = None,
        model: str | None = None,
        route: Route | None = None,
        ttl_s: float | None = None,
        **default_chat_parameters: Any,
    ) -> AsyncSession:
        """Return a new session; the server learns of it with the first turn.

        Args:
            session_id: None: 128 random bits, which nobody can guess.
            system: The system prompt.
            tools: OpenAI tool definitions.
            model: None: the client's.
            route: How prompts get their cache; None: the server decides.
            ttl_s: Seconds that a lease lives after a turn or a renewal; None: the server's default.
            **default_chat_parameters: OpenAI chat parameters of every turn, such as `temperature`.

        Raises:
            TypeError: a parameter is one that the SDK sets itself.
            ValueError: the id cannot travel in a header.
        """
        state = self._state(session_id, system, tools, model, route, ttl_s, default_chat_parameters)
        return AsyncSession(state, self._transport, self._clock)

    def resume(
        self,
        session_id: str,
        transcript: Sequence[Message],
        *,
        turn: int | None = None,
        tools: Sequence[Tool] | None = None,
        model: str | None = None,
        route: Route | None = None,
        ttl_s: float | None = None,
        **default_chat_parameters: Any,
    ) -> AsyncSession:
        """Return a session that began elsewhere, as in another process; nothing is sent before its next turn.

        Where the server still has it, that turn uses its cache; else it is opened again from the transcript.

        Args:
            session_id: Its id.
            transcript: All its messages, as `Session.transcript` gives them.
            turn: Completed turns in it; None: one for each assistant message.
            tools: OpenAI tool definitions, as they were.
            model: None: the client's.
            route: How prompts get their cache; None: the server decides.
            ttl_s: Seconds that a lease lives after a turn or a renewal; None: the server's default.
            **default_chat_parameters: OpenAI chat parameters of every turn, such as `temperature`.

        Raises:
            TypeError: a parameter is one that the SDK sets itself, or an item of the transcript is no message.
            ValueError: the id cannot travel in a header, or there are fewer assistant messages than turns.
        """
        state = self._state(session_id, None, tools, model, route, ttl_s, default_chat_parameters)
        state.resume(transcript, turn)
        return AsyncSession(state, self._transport, self._clock)

    async def sessions(self) -> list[SessionInfo]:
        """Return the caller's sessions on the server, however many requests that takes.

        Raises:
            APIConnectionError: the server cannot be reached.
            APIStatusError: the server refuses.
        """
        calls = pages()
        try:
            call = next(calls)
            while True:
                call = calls.send(await self._transport.send(call))
        except StopIteration as stop:
            return cast("list[SessionInfo]", stop.value)

    async def close(self) -> None:
        """Close the connections, unless the HTTP client was injected; sessions live on."""
        await self._transport.close()
