"""Which failures are tried again, and after how long.

`is_retryable` and `delay_s` are pure; `retrying` and `async_retrying` hand them to tenacity, whose types do
not leave the transport. May import `_errors` and tenacity.

Every request of the SDK may be repeated: control verbs are idempotent, and a turn carries its number and an
idempotency key, so the server answers a repeated one with the stored reply and never appends twice. What is
*not* repeated is what repeating cannot help:

- a timeout after the request was sent: the time that the caller allows is over, and would double
- 500: a bug of the server, which the same request meets again; a server that can be tried later says 503
- an unknown exception: a bug here, which must not be hidden
"""

from __future__ import annotations

import logging
import random
from typing import TYPE_CHECKING, Any, Final

import tenacity

from bidikv_sdk._errors import APIConnectionError, APIStatusError, APITimeoutError, TurnConflict

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

_RETRYABLE_STATUSES: Final = frozenset({408, 425, 429, 502, 503, 504})
_FIRST_DELAY_S: Final = 0.5
_MAX_DELAY_S: Final = 8.0
# A server may name any time; beyond this an agent is better off with the error.
_MAX_SERVER_DELAY_S: Final = 120.0
# Spread the retries of clients that failed together.
_JITTER: Final = 0.25

_logger = logging.getLogger("bidikv")


def is_retryable(error: BaseException) -> bool:
    """Say whether trying again can help."""
    if isinstance(error, APITimeoutError):
        return not error.may_have_arrived
    if isinstance(error, TurnConflict):
        # With `retry_after_s` a turn is running; else the number does not fit, whatever the time.
        return error.retry_after_s is not None
    if isinstance(error, APIStatusError):
        return error.status in _RETRYABLE_STATUSES
    return isinstance(error, APIConnectionError)


def delay_s(num_failures: int, error: BaseException | None, random_unit: float) -> float:
    """Return the wait after failure `num_failures` (from 1): what the server asks, else a backoff.

    `random_unit` in [0, 1) shortens the backoff by up to a quarter; the server's wish is kept, up to 120 s.
    """
    asked_s = error.retry_after_s if isinstance(error, APIStatusError) else None
    if asked_s is not None:
        return min(max(asked_s, 0.0), _MAX_SERVER_DELAY_S)
    backoff_s = min(_FIRST_DELAY_S * 2.0 ** (num_failures - 1), _MAX_DELAY_S)
    return backoff_s * (1 - _JITTER * random_unit)


def retrying(max_retries: int, sleep: Callable[[float], None]) -> tenacity.Retrying:
    """Return a caller `r(fn, *args)` that tries up to `1 + max_retries` times and raises the last error."""
    return tenacity.Retrying(sleep=sleep, **_policy(max_retries))


def async_retrying(max_retries: int, sleep: Callable[[float], Awaitable[None]]) -> tenacity.AsyncRetrying:
    """Return the awaitable twin of `retrying`."""
    return tenacity.AsyncRetrying(sleep=sleep, **_policy(max_retries))


def _policy(max_retries: int) -> dict[str, Any]:
    return {
        "retry": tenacity.retry_if_exception(is_retryable),
        "stop": tenacity.stop_after_attempt(1 + max_retries),
        "wait": _wait,
        "before_sleep": _log,
        "reraise": True,
    }


def _wait(state: tenacity.RetryCallState) -> float:
    return delay_s(state.attempt_number, _error_of(state), random.random())  # noqa: S311 - no secret


def _log(state: tenacity.RetryCallState) -> None:
    upcoming_s = state.next_action.sleep if state.next_action else 0.0
    _logger.info("try %d failed, next in %.1f s: %s", state.attempt_number, upcoming_s, _error_of(state))


def _error_of(state: tenacity.RetryCallState) -> BaseException | None:
    return state.outcome.exception() if state.outcome else None
