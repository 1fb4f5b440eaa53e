"""The client of bidikv: sessions whose KV cache stays on the decode engine between turns.

Public: the names below, the modules `wire` and `prefix`, and the test double in `testing`.
"""

import logging

from bidikv_sdk._client import AsyncBidiKV, BidiKV
from bidikv_sdk._current import CurrentHold, CurrentSession, active_session, current_session
from bidikv_sdk._errors import (
    APIConnectionError,
    APIStatusError,
    APITimeoutError,
    AuthenticationError,
    BadRequestError,
    BidiKVError,
    CapacityExceeded,
    ClientClosed,
    ConfigurationError,
    ConflictError,
    ContextLengthExceeded,
    EngineUnavailable,
    InternalServerError,
    InvalidResponse,
    LeaseLost,
    MisuseError,
    ModelNotFound,
    NotFoundError,
    ProtocolMismatch,
    RateLimitError,
    RequestTooLarge,
    ServerExtensionMissing,
    SessionBusy,
    SessionEnded,
    SessionNotFound,
    StreamClosed,
    StreamInterrupted,
    TurnConflict,
    UnsupportedParameter,
)
from bidikv_sdk._keeper import AsyncLeaseHold, LeaseHold
from bidikv_sdk._session import AsyncSession, Session
from bidikv_sdk._stock import async_session_transport, session_transport
from bidikv_sdk._stream import AsyncTurnStream, TurnStream
from bidikv_sdk._turn import Turn
from bidikv_sdk._types import ChatCompletion, ChatCompletionChunk, Delta, Message, Tool
from bidikv_sdk.wire import CacheReport, LeaseInfo, PoolInfo, SessionInfo

__all__ = [
    "APIConnectionError",
    "APIStatusError",
    "APITimeoutError",
    "AsyncBidiKV",
    "AsyncLeaseHold",
    "AsyncSession",
    "AsyncTurnStream",
    "AuthenticationError",
    "BadRequestError",
    "BidiKV",
    "BidiKVError",
    "CacheReport",
    "CapacityExceeded",
    "ChatCompletion",
    "ChatCompletionChunk",
    "ClientClosed",
    "ConfigurationError",
    "ConflictError",
    "ContextLengthExceeded",
    "CurrentHold",
    "CurrentSession",
    "Delta",
    "EngineUnavailable",
    "InternalServerError",
    "InvalidResponse",
    "LeaseHold",
    "LeaseInfo",
    "LeaseLost",
    "Message",
    "MisuseError",
    "ModelNotFound",
    "NotFoundError",
    "PoolInfo",
    "ProtocolMismatch",
    "RateLimitError",
    "RequestTooLarge",
    "ServerExtensionMissing",
    "Session",
    "SessionBusy",
    "SessionEnded",
    "SessionInfo",
    "SessionNotFound",
    "StreamClosed",
    "StreamInterrupted",
    "Tool",
    "Turn",
    "TurnConflict",
    "TurnStream",
    "UnsupportedParameter",
    "active_session",
    "async_session_transport",
    "current_session",
    "session_transport",
]

# A library decides nothing about logging; without this Python would print its warnings to stderr.
logging.getLogger("bidikv").addHandler(logging.NullHandler())
