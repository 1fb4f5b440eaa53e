"""`Session` and `AsyncSession`: the verbs of one session, as thin drivers over `SessionState`.

May import `_state`, `_stream`, `_keeper`, `_requests`, `_transport` and what lies below them. Longer than other
modules: the two flavours stand side by side, so that they stay alike.
"""

from __future__ import annotations

import contextlib
import logging
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

from bidikv_sdk._errors import BidiKVError, NotFoundError
from bidikv_sdk._keeper import AsyncLeaseHold, LeaseHold
from bidikv_sdk._requests import read_completion
from bidikv_sdk._stream import AsyncTurnStream, TurnStream

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

    from typing_extensions import Self

    from bidikv_sdk._clock import Clock
    from bidikv_sdk._requests import Call, Reply
    from bidikv_sdk._state import ActiveTurn, SessionState
    from bidikv_sdk._transport import AsyncTransport, OpenReply, Transport
    from bidikv_sdk._turn import Turn
    from bidikv_sdk._types import Delta, Message
    from bidikv_sdk.wire import LeaseInfo, Route, SessionInfo

# Leaving a block must not hang on a dead server; what is not given back expires within one TTL.
_EXIT_TIMEOUT_S: Final = 10.0

_logger = logging.getLogger("bidikv")
_ResultT = TypeVar("_ResultT")


class _SessionView:
    """What can be seen of a session without asking the server."""

    def __init__(self, state: SessionState, clock: Clock) -> None:
        self._state = state
        self._clock = clock

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.id} turn={self.turn}>"

    @property
    def id(self) -> str:
        """The session's id."""
        return self._state.id

    @property
    def turn(self) -> int:
        """Number of completed turns."""
        return self._state.turn

    @property
    def lease(self) -> LeaseInfo | None:
        """The lease as the last reply told it; None before the first one."""
        return self._state.lease

    @property
    def transcript(self) -> list[Message]:
        """A copy of all messages: the system prompt, the deltas and the assistant's replies."""
        return self._state.transcript

    def _warn_not_ended(self, error: Exception) -> None:
        self._state.ended = True
        _logger.warning("session %s was not ended, its lease expires by itself: %s", self.id, error)


class Session(_SessionView):
    """A conversation whose KV cache the server keeps between turns; made by `BidiKV.session`.

    A context manager that ends the session. One turn runs at a time; `extend`, `release` and `status` may
    be called beside it, from other threads too. Every verb raises `APIConnectionError`, `APIStatusError` or
    `InvalidResponse` where the server cannot be reached, refuses or breaks the protocol; `SessionEnded`
    after `end`, and `ClientClosed` after the client's `close`.
    """

    def __init__(self, state: SessionState, transport: Transport, clock: Clock) -> None:
        super().__init__(state, clock)
        self._transport = transport

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        try:
            self._end(_EXIT_TIMEOUT_S)
        except (BidiKVError, RuntimeError) as error:
            # RuntimeError: the client was closed inside the block.
            self._warn_not_ended(error)

    def send(
        self,
        delta: Delta,
        *,
        route: Route | None = None,
        ttl_s: float | None = None,
        timeout: float | None = None,
        **chat_parameters: Any,
    ) -> Turn:
        """Run one turn and return it.

        A session that the server lost is opened again from the transcript, by itself.

        Args:
            delta: What the turn adds: the user's text, one message (such as a tool's result), or several.
            route: How the prompt gets its cache; None: the session's default.
            ttl_s: Seconds that the turn's lease lives; None: the session's default.
            timeout: Seconds to wait for the next byte; None: the client's.
            **chat_parameters: OpenAI chat parameters of this turn. `tools` stay for later turns.

        Raises:
            SessionBusy: another turn of this session is running.
            TurnConflict: somebody else ran a turn of this session.
            TypeError: the delta or a parameter cannot be sent.
            ValueError: the delta is empty, or the route unknown.
        """
        with self._state.begin(
            delta, stream=False, route=route, ttl_s=ttl_s, timeout_s=timeout, parameters=chat_parameters
        ) as active:
            reply = self._run(active.exchange())
            return active.commit(read_completion(reply), reply)

    def stream(
        self,
        delta: Delta,
        *,
        route: Route | None = None,
        ttl_s: float | None = None,
        timeout: float | None = None,
        **chat_parameters: Any,
    ) -> TurnStream:
        """Return a turn that arrives in pieces; the request is sent when its `with` block is entered.

        Takes what `send` takes, and raises the same on entering. Once the reply has begun nothing is retried.

        Raises:
            StreamInterrupted: the connection broke while reading; the turn is not in the transcript.
        """

        def begin() -> ActiveTurn:
            return self._state.begin(
                delta, stream=True, route=route, ttl_s=ttl_s, timeout_s=timeout, parameters=chat_parameters
            )

        return TurnStream(begin, self._open)

    def extend(self, ttl_s: float | None = None) -> LeaseInfo:
        """Keep the lease for at least `ttl_s` more seconds (None: the session's default); never shortens it.

        Raises:
            LeaseLost: the lease is gone.
            SessionNotFound: the server does not know the session.
        """
        return self._control(self._state.control("extend", ttl_s=ttl_s)).lease

    def hold(self, ttl_s: float | None = None) -> LeaseHold:
        """Return a context manager that keeps the lease alive in the background, as around a tool call.

        A lost lease is logged and shown in `hold.lost`, and never raised into the block.

        Args:
            ttl_s: Seconds that each renewal asks for; None: the session's default.
        """

        def renew(timeout_s: float) -> LeaseInfo:
            call = self._state.control("extend", ttl_s=ttl_s, timeout_s=timeout_s, max_retries=0)
            return self._control(call).lease

        return LeaseHold(self.id, ttl_s, self._clock, renew)

    def fork(self, at_turn: int | None = None, ttl_s: float | None = None) -> Session:
        """Return a new session with this one's history, which shares its cache: nothing is copied or computed.

        The two go on by themselves; ending one takes nothing from the other. A context manager, as every session.

        Args:
            at_turn: Completed turns that the fork has; None: all.
            ttl_s: Seconds that its lease lives; None: the session's default, else that of its lease.

        Raises:
            SessionBusy: a turn of this session is running.
            ValueError: there is no such turn.
        """
        child = self._state.child(at_turn)
        self._run(self._state.fork(child, ttl_s))
        return Session(child, self._transport, self._clock)

    def rewind(self, turn: int) -> None:
        """Return to the end of an earlier turn: what came behind is forgotten, here and on the server.

        Args:
            turn: Completed turns to keep, 0 for none.

        Raises:
            SessionBusy: a turn of this session is running.
            ValueError: there is no such turn.
        """
        self._state.check_open()
        with self._state.changing():
            self._run(self._state.rewind(turn))

    def replace_history(self, messages: Sequence[Message]) -> None:
        """Put another history in the place of this one, as after compacting it; the next turn uses what still matches.

        Args:
            messages: The whole new history. Every assistant message ends a turn; what stands behind the last one goes
                before the next delta.

        Raises:
            SessionBusy: a turn of this session is running.
            TypeError: an item is no message.
        """
        self._state.check_open()
        with self._state.changing():
            self._run(self._state.replace(messages))

    def release(self) -> SessionInfo:
        """Give the cache back and keep the session: the next turn computes its prompt again."""
        return self._control(self._state.control("release"))

    def status(self) -> SessionInfo:
        """Ask the server for the session.

        Raises:
            SessionNotFound: the server does not know it, as before the first turn.
        """
        return self._control(self._state.status())

    def end(self) -> None:
        """Give the cache back and forget the session; fine where that is done already."""
        self._end(None)

    def _end(self, timeout_s: float | None) -> None:
        if not self._state.ended:
            # Not found is what was asked for.
            with contextlib.suppress(NotFoundError):
                self._transport.send(self._state.end(timeout_s))
            self._state.ended = True

    def _control(self, call: Call) -> SessionInfo:
        return self._state.observe(self._transport.send(call))

    def _open(self, active: ActiveTurn) -> OpenReply:
        return cast("OpenReply", self._run(active.exchange()))

    def _run(self, calls: Generator[Call, Reply, _ResultT]) -> _ResultT:
        try:
            call = next(calls)
            while True:
                try:
                    reply = self._transport.send(call)
                except BidiKVError as error:  # noqa: PERF203 - a loop of at most three requests
                    call = calls.throw(error)
                else:
                    call = calls.send(reply)
        except StopIteration as stop:
            return cast("_ResultT", stop.value)


class AsyncSession(_SessionView):
    """A conversation whose KV cache the server keeps between turns; made by `AsyncBidiKV.session`.

    A context manager that ends the session. One turn runs at a time; `extend`, `release` and `status` may
    be called beside it, from other threads too. Every verb raises `APIConnectionError`, `APIStatusError` or
    `InvalidResponse` where the server cannot be reached, refuses or breaks the protocol; `SessionEnded`
    after `end`, and `ClientClosed` after the client's `close`.
    """

    def __init__(self, state: SessionState, transport: AsyncTransport, clock: Clock) -> None:
        super().__init__(state, clock)
        self._transport = transport

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        try:
            await self._end(_EXIT_TIMEOUT_S)
        except (BidiKVError, RuntimeError) as error:
            # RuntimeError: the client was closed inside the block.
            self._warn_not_ended(error)

    async def send(
        self,
        delta: Delta,
        *,
        route: Route | None = None,
        ttl_s: float | None = None,
        timeout: float | None = None,
        **chat_parameters: Any,
    ) -> Turn:
        """Run one turn and return it.

        A session that the server lost is opened again from the transcript, by itself.

        Args:
            delta: What the turn adds: the user's text, one message (such as a tool's result), or several.
            route: How the prompt gets its cache; None: the session's default.
            ttl_s: Seconds that the turn's lease lives; None: the session's default.
            timeout: Seconds to wait for the next byte; None: the client's.
            **chat_parameters: OpenAI chat parameters of this turn. `tools` stay for later turns.

        Raises:
            SessionBusy: another turn of this session is running.
            TurnConflict: somebody else ran a turn of this session.
            TypeError: the delta or a parameter cannot be sent.
            ValueError: the delta is empty, or the route unknown.
        """
        with self._state.begin(
            delta, stream=False, route=route, ttl_s=ttl_s, timeout_s=timeout, parameters=chat_parameters
        ) as active:
            reply = await self._run(active.exchange())
            return active.commit(read_completion(reply), reply)

    def stream(
        self,
        delta: Delta,
        *,
        route: Route | None = None,
        ttl_s: float | None = None,
        timeout: float | None = None,
        **chat_parameters: Any,
    ) -> AsyncTurnStream:
        """Return a turn that arrives in pieces; the request is sent when its `with` block is entered.

        Takes what `send` takes, and raises the same on entering. Once the reply has begun nothing is retried.

        Raises:
            StreamInterrupted: the connection broke while reading; the turn is not in the transcript.
        """

        def begin() -> ActiveTurn:
            return self._state.begin(
                delta, stream=True, route=route, ttl_s=ttl_s, timeout_s=timeout, parameters=chat_parameters
            )

        return AsyncTurnStream(begin, self._open)

    async def extend(self, ttl_s: float | None = None) -> LeaseInfo:
        """Keep the lease for at least `ttl_s` more seconds (None: the session's default); never shortens it.

        Raises:
            LeaseLost: the lease is gone.
            SessionNotFound: the server does not know the session.
        """
        return (await self._control(self._state.control("extend", ttl_s=ttl_s))).lease

    def hold(self, ttl_s: float | None = None) -> AsyncLeaseHold:
        """Return a context manager that keeps the lease alive in the background, as around a tool call.

        A lost lease is logged and shown in `hold.lost`, and never raised into the block.

        Args:
            ttl_s: Seconds that each renewal asks for; None: the session's default.
        """

        async def renew(timeout_s: float) -> LeaseInfo:
            call = self._state.control("extend", ttl_s=ttl_s, timeout_s=timeout_s, max_retries=0)
            return (await self._control(call)).lease

        return AsyncLeaseHold(self.id, ttl_s, self._clock, renew)

    async def fork(self, at_turn: int | None = None, ttl_s: float | None = None) -> AsyncSession:
        """Return a new session with this one's history, which shares its cache: nothing is copied or computed.

        The two go on by themselves; ending one takes nothing from the other. A context manager, as every session.

        Args:
            at_turn: Completed turns that the fork has; None: all.
            ttl_s: Seconds that its lease lives; None: the session's default, else that of its lease.

        Raises:
            SessionBusy: a turn of this session is running.
            ValueError: there is no such turn.
        """
        child = self._state.child(at_turn)
        await self._run(self._state.fork(child, ttl_s))
        return AsyncSession(child, self._transport, self._clock)

    async def rewind(self, turn: int) -> None:
        """Return to the end of an earlier turn: what came behind is forgotten, here and on the server.

        Args:
            turn: Completed turns to keep, 0 for none.

        Raises:
            SessionBusy: a turn of this session is running.
            ValueError: there is no such turn.
        """
        self._state.check_open()
        with self._state.changing():
            await self._run(self._state.rewind(turn))

    async def replace_history(self, messages: Sequence[Message]) -> None:
        """Put another history in the place of this one, as after compacting it; the next turn uses what still matches.

        Args:
            messages: The whole new history. Every assistant message ends a turn; what stands behind the last one goes
                before the next delta.

        Raises:
            SessionBusy: a turn of this session is running.
            TypeError: an item is no message.
        """
        self._state.check_open()
        with self._state.changing():
            await self._run(self._state.replace(messages))

    async def release(self) -> SessionInfo:
        """Give the cache back and keep the session: the next turn computes its prompt again."""
        return await self._control(self._state.control("release"))

    async def status(self) -> SessionInfo:
        """Ask the server for the session.

        Raises:
            SessionNotFound: the server does not know it, as before the first turn.
        """
        return await self._control(self._state.status())

    async def end(self) -> None:
        """Give the cache back and forget the session; fine where that is done already."""
        await self._end(None)

    async def _end(self, timeout_s: float | None) -> None:
        if not self._state.ended:
            # Not found is what was asked for.
            with contextlib.suppress(NotFoundError):
                await self._transport.send(self._state.end(timeout_s))
            self._state.ended = True

    async def _control(self, call: Call) -> SessionInfo:
        return self._state.observe(await self._transport.send(call))

    async def _open(self, active: ActiveTurn) -> OpenReply:
        return cast("OpenReply", await self._run(active.exchange()))

    async def _run(self, calls: Generator[Call, Reply, _ResultT]) -> _ResultT:
        try:
            call = next(calls)
            while True:
                try:
                    reply = await self._transport.send(call)
                except BidiKVError as error:  # noqa: PERF203 - a loop of at most three requests
                    call = calls.throw(error)
                else:
                    call = calls.send(reply)
        except StopIteration as stop:
            return cast("_ResultT", stop.value)
