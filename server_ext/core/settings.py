"""The settings of a home, checked once at start: names, defaults, limits and what to do about a bad value.

May import the standard library, `bidikv_sdk.wire` and `errors`.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Final, Literal, TypeAlias, get_args

from bidikv_sdk.wire import ROUTES, Route

from .errors import InvalidRequest

Revocation: TypeAlias = Literal["value", "least_remaining"]
REVOCATIONS: Final[tuple[Revocation, ...]] = get_args(Revocation)


@dataclass(frozen=True, slots=True, kw_only=True)
class HomeSettings:
    """How much a home holds, and for how long.

    Raises:
        ValueError: a value is outside its limits; the text names the setting, the value and the fix.
    """

    budget_fraction: float = 0.5
    """Part of the block pool that all leases together may hold, above 0, at most 1."""
    tenant_share: float = 1.0
    """Part of the budget that the leases of one tenant may hold, above 0, at most 1."""
    default_ttl_s: float = 60.0
    """Life of a lease where the caller names none."""
    max_ttl_s: float = 900.0
    """Longest life that a caller can ask for; more is cut to this."""
    ticket_ttl_s: float = 60.0
    """How long a reader may read. Readers decline a ticket with 5 s or less left, so stay well above that."""
    ticket_grace_s: float = 5.0
    """How long its blocks outlast a ticket's deadline: for a read under way, and for clocks that drift."""
    provisional_ttl_s: float = 5.0
    """How long the blocks of a finished turn wait to be settled."""
    turn_timeout_s: float = 3600.0
    """After this a turn that nobody settled or abandoned is given up."""
    session_retention_s: float = 3600.0
    """How long a session is kept after its last use; at least `max_ttl_s`."""
    max_sessions: int = 100_000
    """Most sessions kept; the tenant that has most makes room for a new one, with what was idle longest."""
    max_session_bytes: int = 1 << 30
    """Most bytes that all sessions together take (token ids, transcripts, last replies)."""
    revocation: Revocation = "value"
    """Whose lease requests take blocks from first: the one of least value per block, or of least remaining time."""
    default_route: Route = "auto"
    """The way of a turn whose caller asks for none; `auto` takes the one that is expected to be the fastest."""
    itl_guard: float = 0.25
    """`auto`: by what share the inter-token latency on D may rise, on the mean of half a minute, through turns that are
    appended there, 0 or more; at 0 none is while anything generates."""
    min_fetch_tokens: int = 64
    """No ticket for less than this: a transfer costs more than computing so few tokens."""

    def __post_init__(self) -> None:
        for name, (is_good, fix) in _RULES.items():
            value = getattr(self, name)
            if not is_good(value):
                msg = f"bidikv setting {name!r} is {value!r:.80}: give {fix}"
                raise ValueError(msg)
        for shorter, longer in (("default_ttl_s", "max_ttl_s"), ("max_ttl_s", "session_retention_s")):
            short_s, long_s = getattr(self, shorter), getattr(self, longer)
            if short_s > long_s:
                msg = f"bidikv setting {shorter!r} is {short_s!r}: give at most {longer!r}, which is {long_s!r}"
                raise ValueError(msg)

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "HomeSettings":
        """Build settings from a configuration object; absent names have their defaults.

        Raises:
            ValueError: a name is unknown, or a value is outside its limits.
        """
        known = [f.name for f in fields(cls)]
        for name, value in config.items():
            if name not in known:
                msg = f"bidikv setting {name!r} (value {value!r:.80}) is unknown: use one of {', '.join(known)}"
                raise ValueError(msg)
        return cls(**config)

    def checked_ttl_s(self, ttl_s: Any) -> float:
        """Return the life that a caller asks for, cut to the maximum; None is the default.

        Raises:
            InvalidRequest: it is not a finite number above 0.
        """
        if ttl_s is None:
            return self.default_ttl_s
        is_number = isinstance(ttl_s, int | float) and not isinstance(ttl_s, bool)
        if not is_number or not 0 < ttl_s < math.inf:
            msg = f"ttl_s is {ttl_s!r:.80}: give a number of seconds above 0"
            raise InvalidRequest(msg, param="ttl_s")
        return float(min(ttl_s, self.max_ttl_s))


def _is_number(value: object) -> bool:
    # bool is an int to Python, not to a configuration file.
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_fraction(value: Any) -> bool:
    return _is_number(value) and 0 < value <= 1


def _is_share(value: Any) -> bool:
    return _is_number(value) and value >= 0


def _is_duration(value: Any) -> bool:
    return _is_number(value) and value > 0


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_positive_count(value: Any) -> bool:
    return _is_count(value) and value > 0


_FRACTION: Final = (_is_fraction, "a number above 0 and at most 1")
_DURATION: Final = (_is_duration, "a number of seconds above 0")

_RULES: Final[Mapping[str, tuple[Callable[[Any], bool], str]]] = {
    "budget_fraction": _FRACTION,
    "tenant_share": _FRACTION,
    "default_ttl_s": _DURATION,
    "max_ttl_s": _DURATION,
    "ticket_ttl_s": _DURATION,
    "ticket_grace_s": _DURATION,
    "provisional_ttl_s": _DURATION,
    "turn_timeout_s": _DURATION,
    "session_retention_s": _DURATION,
    "max_sessions": (_is_positive_count, "a whole number above 0"),
    "max_session_bytes": (_is_positive_count, "a whole number of bytes above 0"),
    "revocation": (lambda value: value in REVOCATIONS, f"one of {', '.join(REVOCATIONS)}"),
    "default_route": (lambda value: value in ROUTES, f"one of {', '.join(ROUTES)}"),
    "itl_guard": (_is_share, "a number, 0 or more"),
    "min_fetch_tokens": (_is_count, "a whole number of tokens, 0 or more"),
}
