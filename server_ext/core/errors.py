"""The errors that a home answers with, each one code of the wire.

HomeError
├── InvalidRequest      invalid_request
├── SessionNotFound     session_not_found
├── TurnConflict        turn_conflict
├── LeaseLost           lease_lost
└── CapacityExceeded    capacity_exceeded
"""

from typing import TYPE_CHECKING, Any, ClassVar, Final

from bidikv_sdk.wire import ErrorInfo

if TYPE_CHECKING:
    from bidikv_sdk.wire import ErrorCode, Reason

# A turn may last longer than this, but whoever waits for one should see its end soon.
TURN_RETRY_AFTER_S: Final = 0.2


class HomeError(Exception):
    """An operation was refused and changed nothing; `info` is what goes on the wire."""

    code: ClassVar["ErrorCode"] = "internal_error"

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        retry_after_s: float | None = None,
        expected_turn: int | None = None,
        reason: "Reason | None" = None,
    ) -> None:
        super().__init__(message)
        self.info = ErrorInfo(self.code, message, param, retry_after_s, expected_turn, reason)

    def to_json(self) -> dict[str, Any]:
        """Return the JSON object that lies under the key `error` of a reply."""
        return self.info.to_json()


class InvalidRequest(HomeError):
    """A value is malformed; `info.param` names the field."""

    code = "invalid_request"


class SessionNotFound(HomeError):
    """The id is unknown, another tenant's, or its record was dropped."""

    code = "session_not_found"


def session_is_unknown(session_id: str) -> SessionNotFound:
    """Return the error of a call that needs a session's record."""
    msg = f"session {session_id!r} is not known here: open it again with its full history"
    return SessionNotFound(msg)


class TurnConflict(HomeError):
    """A turn is running (`info.retry_after_s`), or its number does not fit (`info.expected_turn`)."""

    code = "turn_conflict"


def turn_is_running(session_id: str) -> TurnConflict:
    """Return the error of a call that has to wait for the session's turn."""
    msg = f"a turn of session {session_id!r} is running: retry when it has ended"
    return TurnConflict(msg, retry_after_s=TURN_RETRY_AFTER_S)


def turn_is_not_open(nonce: str) -> TurnConflict:
    """Return the error of a call that ends a turn which has ended already, or never began."""
    msg = f"turn {nonce!r} is not open: it was ended or took too long; begin it again"
    return TurnConflict(msg, retry_after_s=TURN_RETRY_AFTER_S)


class LeaseLost(HomeError):
    """There is no lease to extend; `info.reason` says why."""

    code = "lease_lost"


class CapacityExceeded(HomeError):
    """The session store is full; `info.retry_after_s` is set."""

    code = "capacity_exceeded"
