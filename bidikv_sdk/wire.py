"""The wire protocol's words and records, shared by the SDK and the server (prose: `docs/http.md`).

`to_json` builds what is sent and `from_json` checks what was received. Fields that a newer peer added are
ignored; a missing or wrongly typed one is a `ProtocolError`. May import the standard library and
typing-extensions only. Long, because all that is on the wire stands in one place.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Any, Final, Literal, TypeVar, cast, get_args

from typing_extensions import Self

PROTOCOL: Final = 1
"""The protocol version of this module. A new word in a closed list, or a new meaning, bumps it.

1. The first version.
"""

Outcome = Literal["local", "fetched", "prefilled", "recomputed"]
"""How the prompt of a turn got its KV cache."""

Reason = Literal[
    "first_turn",
    "cheapest",
    "forced",
    "below_threshold",
    "lease_expired",
    "lease_revoked",
    "released",
    "over_budget",
    "reset",
    "home_lost",
    "home_draining",
    "model_changed",
    "system_changed",
    "tools_changed",
    "messages_changed",
    "ticket_late",
    "read_failed",
    "prefill_unavailable",
    "unsupported",
]
"""Why a turn went that way, or why a lease is smaller than its turn, or gone."""

LeaseState = Literal["none", "active", "released", "expired", "revoked"]
"""`none`: no finished turn of the session holds a lease."""

Route = Literal["auto", "fetch", "local", "prefill", "recompute"]
"""What a caller may ask for; `auto`: the server takes the way that it expects to be the fastest."""

ChosenBy = Literal["cheapest", "guard", "trial", "only"]
"""Why `auto` took a way: it was expected to be the fastest; appending on D would have been, but held up what generates
there for too long; to see whether a way has become faster; no other was possible."""

ErrorCode = Literal[
    "invalid_request",
    "unsupported_parameter",
    "protocol_mismatch",
    "context_length_exceeded",
    "invalid_api_key",
    "session_not_found",
    "model_not_found",
    "turn_conflict",
    "lease_lost",
    "request_too_large",
    "capacity_exceeded",
    "engine_unavailable",
    "internal_error",
]

OUTCOMES: Final[tuple[Outcome, ...]] = get_args(Outcome)
REASONS: Final[tuple[Reason, ...]] = get_args(Reason)
LEASE_STATES: Final[tuple[LeaseState, ...]] = get_args(LeaseState)
ROUTES: Final[tuple[Route, ...]] = get_args(Route)
CHOSEN_BY: Final[tuple[ChosenBy, ...]] = get_args(ChosenBy)
ERROR_CODES: Final[tuple[ErrorCode, ...]] = get_args(ErrorCode)

ERROR_STATUS: Final[Mapping[ErrorCode, int]] = MappingProxyType(
    {
        "invalid_request": 400,
        "unsupported_parameter": 400,
        "protocol_mismatch": 400,
        "context_length_exceeded": 400,
        "invalid_api_key": 401,
        "session_not_found": 404,
        "model_not_found": 404,
        "turn_conflict": 409,
        "lease_lost": 409,
        "request_too_large": 413,
        "capacity_exceeded": 429,
        "engine_unavailable": 503,
        "internal_error": 500,
    }
)
"""The HTTP status of every error code."""

_ERROR_TYPE_BY_STATUS: Final = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    409: "conflict_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
}


_WordT = TypeVar("_WordT", bound=str)


class ProtocolError(ValueError):
    """A message does not have the shape that the protocol gives it; the text names the field."""


class _Record:
    """A frozen slots dataclass with scalars and other records in its fields."""

    __slots__: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return the JSON object of the wire, every field in it."""
        values = ((name, getattr(self, name)) for name in self.__slots__)
        return {name: value.to_json() if isinstance(value, _Record) else value for name, value in values}


@dataclass(frozen=True, slots=True)
class LeaseInfo(_Record):
    """The lease of a session: KV blocks that the server keeps until a deadline."""

    state: LeaseState
    remaining_s: float
    """Seconds until the lease expires, counted when the reply was built; 0 unless active."""
    num_tokens: int
    num_blocks: int
    reason: Reason | None = None
    """None, or why the lease is smaller than its turn, or gone."""

    @classmethod
    def from_json(cls, data: object) -> Self:
        """Read the JSON object of the wire.

        Raises:
            ProtocolError: a field is missing or wrongly typed.
        """
        get = _Reader("lease", data)
        return cls(
            state=get.word("state", LEASE_STATES),
            remaining_s=get.number("remaining_s"),
            num_tokens=get.count("num_tokens"),
            num_blocks=get.count("num_blocks"),
            reason=get.word_or_none("reason", REASONS),
        )


@dataclass(frozen=True, slots=True)
class Timings(_Record):
    """Seconds that each step of a turn took; None where it did not happen or cannot be told apart."""

    render: float | None = None
    begin: float | None = None
    prefill: float | None = None
    fetch: float | None = None
    handover: float | None = None
    settle: float | None = None
    ttft: float | None = None

    @classmethod
    def from_json(cls, data: object) -> Self:
        """Read the JSON object of the wire; an absent timing is None.

        Raises:
            ProtocolError: a timing is neither a number nor null.
        """
        get = _Reader("timings_s", data)
        return cls(**{f.name: get.number_or_none(f.name) for f in fields(cls)})


@dataclass(frozen=True, slots=True)
class Choice(_Record):
    """What `auto` expected of each way, in seconds from the turn's begin to its first token; None: not possible."""

    by: ChosenBy
    local: float | None = None
    fetch: float | None = None
    prefill: float | None = None

    @classmethod
    def from_json(cls, data: object) -> Self:
        """Read the JSON object of the wire; an absent way is None.

        Raises:
            ProtocolError: a field is wrongly typed, or `by` is missing.
        """
        get = _Reader("choice", data)
        return cls(
            by=get.word("by", CHOSEN_BY),
            local=get.number_or_none("local"),
            fetch=get.number_or_none("fetch"),
            prefill=get.number_or_none("prefill"),
        )


@dataclass(frozen=True, slots=True)
class CacheReport(_Record):
    """Where the KV cache of one turn's prompt came from.

    `reused_tokens + fetched_tokens + computed_tokens == prompt_tokens`.
    """

    outcome: Outcome
    reason: Reason
    prompt_tokens: int
    held_tokens: int
    """Tokens in the session's lease when the turn began."""
    reused_tokens: int
    """Tokens that lay already where the prompt was computed."""
    fetched_tokens: int
    """Tokens that the prefill engine read from the session's lease."""
    computed_tokens: int
    diverged_at: int | None = None
    """Index of the first prompt token that differs from what was held; None where nothing diverged."""
    timings_s: Timings = field(default_factory=Timings)
    choice: Choice | None = None
    """What `auto` chose from; None where the route was given."""

    @classmethod
    def from_json(cls, data: object) -> Self:
        """Read the JSON object of the wire.

        Raises:
            ProtocolError: a field is missing or wrongly typed.
        """
        get = _Reader("cache", data)
        return cls(
            outcome=get.word("outcome", OUTCOMES),
            reason=get.word("reason", REASONS),
            prompt_tokens=get.count("prompt_tokens"),
            held_tokens=get.count("held_tokens"),
            reused_tokens=get.count("reused_tokens"),
            fetched_tokens=get.count("fetched_tokens"),
            computed_tokens=get.count("computed_tokens"),
            diverged_at=get.count_or_none("diverged_at"),
            timings_s=Timings.from_json(get.value("timings_s")),
            choice=None if get.value_or_none("choice") is None else Choice.from_json(get.value("choice")),
        )


@dataclass(frozen=True, slots=True)
class PoolInfo(_Record):
    """The KV block pool of the engine that is the session's home."""

    free_blocks: int
    total_blocks: int
    pending_ticket_blocks: int

    @classmethod
    def from_json(cls, data: object) -> Self:
        """Read the JSON object of the wire.

        Raises:
            ProtocolError: a field is missing or wrongly typed.
        """
        get = _Reader("pool", data)
        return cls(**{f.name: get.count(f.name) for f in fields(cls)})


@dataclass(frozen=True, slots=True)
class SessionInfo(_Record):
    """The `bidikv` object, which every successful reply carries."""

    session: str
    turn: int
    """Number of completed turns of the session."""
    lease: LeaseInfo
    cache: CacheReport | None
    """None except in the reply to a turn."""
    pool: PoolInfo
    protocol: int = PROTOCOL
    last_turn: CacheReport | None = None
    """Report of the last completed turn, in replies to get and list only; None where there is none."""

    @classmethod
    def from_json(cls, data: object) -> Self:
        """Read the JSON object of the wire (what lies under the key `bidikv`).

        Raises:
            ProtocolError: a field is missing or wrongly typed, or the version is not `PROTOCOL`.
        """
        get = _Reader("bidikv", data)
        protocol = get.count("protocol")
        if protocol != PROTOCOL:
            msg = f"the peer speaks protocol {protocol}, this package speaks {PROTOCOL}: upgrade the older one"
            raise ProtocolError(msg)
        cache, last_turn = get.value("cache"), get.value_or_none("last_turn")
        return cls(
            session=get.text("session"),
            turn=get.count("turn"),
            lease=LeaseInfo.from_json(get.value("lease")),
            cache=None if cache is None else CacheReport.from_json(cache),
            pool=PoolInfo.from_json(get.value("pool")),
            protocol=protocol,
            last_turn=None if last_turn is None else CacheReport.from_json(last_turn),
        )


@dataclass(frozen=True, slots=True)
class ErrorInfo:
    """What lies under the key `error` of an error reply."""

    code: ErrorCode
    message: str
    param: str | None = None
    """Name of the request field that is at fault."""
    retry_after_s: float | None = None
    expected_turn: int | None = None
    """Number that the session's next turn must have (`turn_conflict`)."""
    reason: Reason | None = None
    """Why the lease is gone (`lease_lost`)."""

    @property
    def status(self) -> int:
        """The HTTP status of this error."""
        return ERROR_STATUS[self.code]

    def to_json(self) -> dict[str, Any]:
        """Return the JSON object of the wire; the extra fields are there only where set."""
        extra = {
            "retry_after_s": self.retry_after_s,
            "expected_turn": self.expected_turn,
            "reason": self.reason,
        }
        return {
            "message": self.message,
            "type": _ERROR_TYPE_BY_STATUS.get(self.status, "server_error"),
            "param": self.param,
            "code": self.code,
            **{name: value for name, value in extra.items() if value is not None},
        }

    @classmethod
    def from_json(cls, data: object) -> Self:
        """Read the JSON object of the wire; absent extra fields are None.

        Raises:
            ProtocolError: the code is not in `ERROR_CODES` (not our error), or a field is wrongly typed.
        """
        get = _Reader("error", data)
        return cls(
            code=get.word("code", ERROR_CODES),
            message=get.text("message"),
            param=get.text_or_none("param"),
            retry_after_s=get.number_or_none("retry_after_s"),
            expected_turn=get.count_or_none("expected_turn"),
            reason=get.word_or_none("reason", REASONS),
        )


def sessions_to_json(sessions: Iterable[SessionInfo], *, has_more: bool = False) -> dict[str, Any]:
    """Return the body of `GET /v1/sessions`; `has_more`: this is a page, and others follow."""
    return {"object": "list", "data": [session.to_json() for session in sessions], "has_more": has_more}


def sessions_from_json(data: object) -> list[SessionInfo]:
    """Read the body of `GET /v1/sessions`.

    Raises:
        ProtocolError: there is no `data` list of `bidikv` objects.
    """
    items = _Reader("sessions", data).value("data")
    if not isinstance(items, list):
        msg = f"sessions.data must be a list, got {items!r:.80}"
        raise ProtocolError(msg)
    return [SessionInfo.from_json(item) for item in items]


class _Reader:
    """Checked access to one JSON object; every error names `{object}.{field}` and the value."""

    __slots__ = ("_data", "_name")

    def __init__(self, name: str, data: object) -> None:
        if not isinstance(data, Mapping):
            msg = f"{name} must be a JSON object, got {data!r:.80}"
            raise ProtocolError(msg)
        self._name = name
        self._data = cast("Mapping[str, object]", data)

    def value(self, key: str) -> object:
        if key not in self._data:
            msg = f"{self._name}.{key} is missing"
            raise ProtocolError(msg)
        return self._data[key]

    def value_or_none(self, key: str) -> object:
        return self._data.get(key)

    def text(self, key: str) -> str:
        value = self.value(key)
        if isinstance(value, str):
            return value
        raise self._wrong(key, value, "a string")

    def text_or_none(self, key: str) -> str | None:
        return None if self._data.get(key) is None else self.text(key)

    def count(self, key: str) -> int:
        value = self.value(key)
        # bool is an int to Python, not to the protocol.
        if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
            return value
        raise self._wrong(key, value, "an integer >= 0")

    def count_or_none(self, key: str) -> int | None:
        return None if self._data.get(key) is None else self.count(key)

    def number(self, key: str) -> float:
        value = self.value(key)
        if isinstance(value, int | float) and not isinstance(value, bool):
            return float(value)
        raise self._wrong(key, value, "a number")

    def number_or_none(self, key: str) -> float | None:
        return None if self._data.get(key) is None else self.number(key)

    def word(self, key: str, words: tuple[_WordT, ...]) -> _WordT:
        value = self.value(key)
        for word in words:
            if value == word:
                return word
        raise self._wrong(key, value, f"one of {', '.join(words)}")

    def word_or_none(self, key: str, words: tuple[_WordT, ...]) -> _WordT | None:
        return None if self._data.get(key) is None else self.word(key, words)

    def _wrong(self, key: str, value: object, wanted: str) -> ProtocolError:
        msg = f"{self._name}.{key} must be {wanted}, got {value!r:.80}"
        return ProtocolError(msg)
