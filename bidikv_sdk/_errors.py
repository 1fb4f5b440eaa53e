"""Every error that the SDK raises, in one tree.

    BidiKVError
    ├── APIConnectionError           no reply: refused, reset, name not found
    │   └── APITimeoutError
    ├── APIStatusError               a reply with status >= 400
    │   ├── BadRequestError          400, 422
    │   │   ├── UnsupportedParameter
    │   │   ├── ProtocolMismatch
    │   │   └── ContextLengthExceeded
    │   ├── AuthenticationError      401, 403
    │   ├── NotFoundError            404
    │   │   ├── SessionNotFound
    │   │   ├── ModelNotFound
    │   │   └── ServerExtensionMissing
    │   ├── ConflictError            409
    │   │   ├── TurnConflict
    │   │   └── LeaseLost
    │   ├── RequestTooLarge          413
    │   ├── RateLimitError           429
    │   │   └── CapacityExceeded
    │   └── InternalServerError      500 and above
    │       └── EngineUnavailable
    ├── InvalidResponse              a reply that breaks the protocol
    └── StreamInterrupted            a stream that ended before its turn did

    MisuseError (a RuntimeError)     a bug of the caller, never of the network or the server
    ├── ConfigurationError
    ├── ClientClosed
    ├── SessionEnded
    ├── SessionBusy
    └── StreamClosed

A wrong argument is Python's own TypeError or ValueError. May import `wire` only.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

    from bidikv_sdk.wire import ErrorCode, Reason


class BidiKVError(Exception):
    """Root of everything that can go wrong between the SDK and the server."""


class APIConnectionError(BidiKVError):
    """The server could not be reached, or the connection broke before a reply came."""

    def __init__(self, message: str, *, request_id: str | None = None, may_have_arrived: bool = True) -> None:
        super().__init__(message)
        self.request_id = request_id
        """`X-Request-Id` that the request carried."""
        self.may_have_arrived = may_have_arrived
        """False where the request surely never reached the server."""


class APITimeoutError(APIConnectionError):
    """The time allowed for connecting, sending or waiting for the next byte is over."""


class APIStatusError(BidiKVError):
    """The server answered with an error status."""

    def __init__(  # noqa: PLR0913 - one per field of the wire's error object
        self,
        message: str,
        *,
        status: int,
        code: ErrorCode | None = None,
        request_id: str | None = None,
        body: Any = None,
        param: str | None = None,
        retry_after_s: float | None = None,
        expected_turn: int | None = None,
        reason: Reason | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        """HTTP status."""
        self.code = code
        """Code of the protocol; None where the error came from something else, such as a proxy."""
        self.request_id = request_id
        """`X-Request-Id` of the reply; quote it in bug reports."""
        self.body = body
        """The reply's body: parsed JSON where it was JSON, else text."""
        self.param = param
        """Name of the request field that is at fault."""
        self.retry_after_s = retry_after_s
        """Seconds after which the server asks to be tried again, or None."""
        self.expected_turn = expected_turn
        """Number that the session's next turn must have (`TurnConflict`)."""
        self.reason = reason
        """Why the lease is gone (`LeaseLost`)."""

    def __str__(self) -> str:
        named = f" (request {self.request_id})" if self.request_id else ""
        return f"{self.status} {self.code or 'error'}: {self.message}{named}"


class BadRequestError(APIStatusError):
    """The request is malformed; `param` names the field."""


class UnsupportedParameter(BadRequestError):
    """The server refuses this parameter by name."""


class ProtocolMismatch(BadRequestError):
    """SDK and server speak different protocol versions: upgrade the older one."""


class ContextLengthExceeded(BadRequestError):
    """The prompt plus `max_tokens` does not fit in the model."""


class AuthenticationError(APIStatusError):
    """No API key, an unknown one, or one without the right."""


class NotFoundError(APIStatusError):
    """The thing that the request names does not exist."""


class SessionNotFound(NotFoundError):
    """The server does not know this session, or dropped it."""


class ModelNotFound(NotFoundError):
    """The server does not serve this model."""


class ServerExtensionMissing(NotFoundError):
    """The server answers, but has no bidikv routes: stock vLLM without the endpoint plugin."""


class ConflictError(APIStatusError):
    """The request does not fit the state that the server is in."""


class TurnConflict(ConflictError):
    """A turn of the session is running (`retry_after_s`), or its number does not fit (`expected_turn`)."""


class LeaseLost(ConflictError):
    """The lease is gone (`reason`); the next turn works, and computes again what it must."""


class RequestTooLarge(APIStatusError):
    """The body exceeds the server's limit."""


class RateLimitError(APIStatusError):
    """Too many requests."""


class CapacityExceeded(RateLimitError):
    """The server's session store is full; `retry_after_s` says when to try again."""


class InternalServerError(APIStatusError):
    """The server, or something before it, failed."""


class EngineUnavailable(InternalServerError):
    """The engine did not answer in time, is draining, or is dead."""


class InvalidResponse(BidiKVError):
    """The reply breaks the protocol: not JSON, or a field is missing."""

    def __init__(self, message: str, *, request_id: str | None = None, body: Any = None) -> None:
        super().__init__(message)
        self.request_id = request_id
        """`X-Request-Id` of the reply."""
        self.body = body
        """What was received: parsed JSON, or text."""


class StreamInterrupted(BidiKVError):
    """A stream ended before its turn did; the turn is not in the transcript, and the next send works."""

    def __init__(self, message: str, *, partial_text: str, request_id: str | None = None) -> None:
        super().__init__(message)
        self.partial_text = partial_text
        """The text that had arrived."""
        self.request_id = request_id
        """`X-Request-Id` of the reply."""


class MisuseError(RuntimeError):
    """The SDK was used in a way that cannot work."""


class ConfigurationError(MisuseError):
    """A setting is missing or cannot be used."""


class ClientClosed(MisuseError):
    """The client was closed before."""


class SessionEnded(MisuseError):
    """The session was ended before; open a new one."""


class SessionBusy(MisuseError):
    """A turn of the session is running: a session runs one at a time."""


class StreamClosed(MisuseError):
    """The stream is not open: not entered yet, or left before its turn was complete."""


ERROR_CLASS_BY_CODE: Final[Mapping[ErrorCode, type[APIStatusError]]] = MappingProxyType(
    {
        "invalid_request": BadRequestError,
        "unsupported_parameter": UnsupportedParameter,
        "protocol_mismatch": ProtocolMismatch,
        "context_length_exceeded": ContextLengthExceeded,
        "invalid_api_key": AuthenticationError,
        "session_not_found": SessionNotFound,
        "model_not_found": ModelNotFound,
        "turn_conflict": TurnConflict,
        "lease_lost": LeaseLost,
        "request_too_large": RequestTooLarge,
        "capacity_exceeded": CapacityExceeded,
        "engine_unavailable": EngineUnavailable,
        "internal_error": InternalServerError,
    }
)
"""The class of every error code of the wire."""

_ERROR_CLASS_BY_STATUS: Final[Mapping[int, type[APIStatusError]]] = MappingProxyType(
    {
        400: BadRequestError,
        401: AuthenticationError,
        403: AuthenticationError,
        # Without our error body: these routes do not exist there.
        404: ServerExtensionMissing,
        409: ConflictError,
        413: RequestTooLarge,
        422: BadRequestError,
        429: RateLimitError,
    }
)


def error_class_of(status: int, code: ErrorCode | None) -> type[APIStatusError]:
    """Return the class for a reply with this status and, where it came from a bidikv server, this code."""
    if code is not None:
        return ERROR_CLASS_BY_CODE[code]
    return _ERROR_CLASS_BY_STATUS.get(status, InternalServerError if status >= 500 else APIStatusError)  # noqa: PLR2004
