"""Refusals as HTTP replies: one exception for everything that a caller is told, in OpenAI's shape."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from fastapi.responses import JSONResponse

from bidikv_sdk.wire import ErrorInfo
from server_ext.engine import compat

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from bidikv_sdk.wire import ErrorCode

RETRY_AFTER_S = 1.0


class Refused(Exception):
    """A request is refused; `info` is what the caller gets."""

    def __init__(
        self, message: str, *, code: ErrorCode = "invalid_request", param: str | None = None, **extra: Any
    ) -> None:
        """Build a refusal from its parts (see `wire.ErrorInfo`)."""
        super().__init__(message)
        self.info = ErrorInfo(code, message, param, **extra)

    @classmethod
    def from_info(cls, info: ErrorInfo) -> Refused:
        """Build a refusal from what another part of the server said."""
        refused = cls(info.message)
        refused.info = info
        return refused

    def to_response(self, headers: Mapping[str, str]) -> JSONResponse:
        """Return the HTTP reply."""
        extra = {"Retry-After": str(max(1, round(self.info.retry_after_s)))} if self.info.retry_after_s else {}
        return JSONResponse({"error": self.info.to_json()}, self.info.status, {**headers, **extra})


@contextmanager
def vllm_errors() -> Iterator[None]:
    """Turn what vLLM's serving code raises into a refusal with the status that its own routes would answer."""
    try:
        yield
    except compat.EngineDeadError as error:
        msg = "the engine is dead; try another decode node"
        raise Refused(msg, code="engine_unavailable", retry_after_s=RETRY_AFTER_S) from error
    except (compat.VLLMError, ValueError, TypeError, OverflowError, NotImplementedError) as error:
        told = compat.create_error_response(error).error
        raise refused_by_vllm(told.code, told.message) from error


def refused_by_vllm(status: int, message: str) -> Refused:
    """Translate an error of vLLM's own serving code.

    Args:
        status: its HTTP status.
        message: its text.
    """
    if "context length" in message or "max_model_len" in message:
        return Refused(message, code="context_length_exceeded", param="messages")
    code: ErrorCode = {404: "model_not_found", 503: "engine_unavailable"}.get(  # type: ignore[assignment]
        status,
        "internal_error" if status >= 500 else "invalid_request",  # noqa: PLR2004 - HTTP's classes
    )
    return Refused(message, code=code, param="model" if code == "model_not_found" else None)
