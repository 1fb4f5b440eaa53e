"""Keeps a lease alive around a tool call.

`Keeper` decides and is pure: it is fed the time and the results, and answers renew, wait or lost. `LeaseHold`
(a thread) and `AsyncLeaseHold` (a task) do what it says: enter (the first renewal starts at once), renew and
wait in turn, exit (wakes at once). A lost lease is never an error for the tool: the next turn computes again.
May import `_retry`, `_errors`, `_clock` and `wire`.
"""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypeAlias

from bidikv_sdk._errors import APIStatusError, APITimeoutError, BidiKVError, MisuseError
from bidikv_sdk._retry import is_retryable

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from typing_extensions import Self

    from bidikv_sdk._clock import Clock
    from bidikv_sdk.wire import LeaseInfo

# The server's own default, used until its first answer tells the time granted.
_ASSUMED_TTL_S: Final = 60.0
# Between these, half of the TTL: not a busy loop for a tiny one, and several tries left for a long one.
_MIN_INTERVAL_S: Final = 0.25
_MAX_INTERVAL_S: Final = 30.0
# A renewal takes milliseconds; one that hangs must not eat the time of the next.
_MAX_RENEWAL_S: Final = 10.0
# At exit a renewal in flight is not worth the tool's time: its thread ends by itself.
_JOIN_S: Final = 0.1
_SERVER_FAULT: Final = 500

_logger = logging.getLogger("bidikv")


@dataclass(frozen=True, slots=True)
class Renew:
    """Renew now, and give up on that renewal after `timeout_s`."""

    timeout_s: float


@dataclass(frozen=True, slots=True)
class Wait:
    """Do nothing for `delay_s`."""

    delay_s: float


@dataclass(frozen=True, slots=True)
class Lost:
    """The lease is gone, or must be taken for gone; there is nothing left to do."""

    why: str


Decision: TypeAlias = Renew | Wait | Lost


class Keeper:
    """When to renew a lease; times are monotonic seconds of the caller's clock."""

    def __init__(self, ttl_s: float | None, now_s: float) -> None:
        self._ttl_s = ttl_s or _ASSUMED_TTL_S
        self._deadline_s = now_s + self._ttl_s
        self._due_s = now_s
        self._lost: Lost | None = None

    def decide(self, now_s: float) -> Decision:
        """Return what to do now."""
        if self._lost is None and now_s >= self._deadline_s:
            self._lost = Lost(f"no renewal succeeded within {self._ttl_s:.1f} s")
        if self._lost is not None:
            return self._lost
        if now_s < self._due_s:
            return Wait(min(self._due_s, self._deadline_s) - now_s)
        return Renew(min(self._interval_s, _MAX_RENEWAL_S))

    def renewed(self, started_s: float, lease: LeaseInfo) -> None:
        """Take the answer to a renewal that was sent at `started_s`."""
        if lease.state != "active":
            self._lost = Lost(f"the lease is {lease.state} ({lease.reason})")
            return
        # What was granted counts, not what was asked; from the sending on, to be on the safe side.
        self._ttl_s = lease.remaining_s
        self._deadline_s = started_s + self._ttl_s
        self._due_s = started_s + self._interval_s

    def failed(self, now_s: float, error: Exception) -> None:
        """Take the failure of a renewal: a transient one is tried again soon, any other one is final."""
        if is_transient(error):
            self._due_s = now_s + max(self._interval_s / 4, _MIN_INTERVAL_S)
        else:
            self._lost = Lost(f"{type(error).__name__}: {error}")

    @property
    def _interval_s(self) -> float:
        return min(max(self._ttl_s / 2, _MIN_INTERVAL_S), _MAX_INTERVAL_S)


def is_transient(error: Exception) -> bool:
    """Say whether a later renewal can succeed; unlike a turn, a renewal that timed out is worth repeating."""
    if isinstance(error, APIStatusError) and error.status >= _SERVER_FAULT:
        return True
    return isinstance(error, APITimeoutError) or is_retryable(error)


class _Hold:
    """What both drivers share: the verdict, and telling it."""

    def __init__(self, session_id: str, ttl_s: float | None, clock: Clock) -> None:
        self._session_id = session_id
        self._ttl_s = ttl_s
        self._clock = clock
        self._lost: Lost | None = None

    @property
    def lost(self) -> bool:
        """True where the lease is gone, or no renewal succeeded for a full TTL."""
        return self._lost is not None

    @property
    def lost_reason(self) -> str | None:
        """Why the lease is lost, in words; None where it is not."""
        return None if self._lost is None else self._lost.why

    def _tell(self, lost: Lost) -> None:
        self._lost = lost
        _logger.warning("session %s: lease lost while held: %s", self._session_id, lost.why)

    def _log_bug(self, error: Exception) -> None:
        if not isinstance(error, BidiKVError | MisuseError):
            _logger.error("session %s: renewing failed by a bug", self._session_id, exc_info=error)


class LeaseHold(_Hold):
    """A context manager that keeps the session's lease alive in the background until its block ends."""

    def __init__(self, session_id: str, ttl_s: float | None, clock: Clock, renew: Callable[[float], LeaseInfo]) -> None:
        super().__init__(session_id, ttl_s, clock)
        self._renew = renew

    def __enter__(self) -> Self:
        self._stop = threading.Event()
        # A daemon: a renewal that hangs must not keep the program from ending.
        self._thread = threading.Thread(target=self._run, name="bidikv-hold", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stop.set()
        self._thread.join(_JOIN_S)

    def _run(self) -> None:
        keeper = Keeper(self._ttl_s, self._clock.now_s())
        while not self._stop.is_set():
            decision = keeper.decide(now_s := self._clock.now_s())
            if isinstance(decision, Lost):
                self._tell(decision)
                return
            if isinstance(decision, Wait):
                self._clock.wait(self._stop, decision.delay_s)
                continue
            try:
                keeper.renewed(now_s, self._renew(decision.timeout_s))
            except Exception as error:  # noqa: BLE001 - a bug here must not kill the tool; it is logged
                if not self._stop.is_set():
                    self._log_bug(error)
                    keeper.failed(self._clock.now_s(), error)


class AsyncLeaseHold(_Hold):
    """A context manager that keeps the session's lease alive in the background until its block ends."""

    def __init__(
        self,
        session_id: str,
        ttl_s: float | None,
        clock: Clock,
        renew: Callable[[float], Awaitable[LeaseInfo]],
    ) -> None:
        super().__init__(session_id, ttl_s, clock)
        self._renew = renew

    async def __aenter__(self) -> Self:
        import asyncio  # noqa: PLC0415 - loaded already where this runs; synchronous users never need it

        self._stop = asyncio.Event()
        self._task = asyncio.create_task(self._run(), name="bidikv-hold")
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        import asyncio  # noqa: PLC0415 - as above

        # Both: before Python 3.12 `wait_for` swallows a cancellation that comes together with its result.
        self._stop.set()
        self._task.cancel()
        await asyncio.wait([self._task])

    async def _run(self) -> None:
        import asyncio  # noqa: PLC0415 - as above

        keeper = Keeper(self._ttl_s, self._clock.now_s())
        while not self._stop.is_set():
            decision = keeper.decide(now_s := self._clock.now_s())
            if isinstance(decision, Lost):
                self._tell(decision)
                return
            if isinstance(decision, Wait):
                await self._clock.wait_async(self._stop, decision.delay_s)
                continue
            try:
                # httpx bounds each step of a request; this bounds their sum.
                lease = await asyncio.wait_for(self._renew(decision.timeout_s), decision.timeout_s)
                keeper.renewed(now_s, lease)
            except asyncio.TimeoutError:
                keeper.failed(self._clock.now_s(), APITimeoutError("the renewal took too long"))
            except Exception as error:  # noqa: BLE001 - a bug here must not kill the tool; it is logged
                self._log_bug(error)
                keeper.failed(self._clock.now_s(), error)
