"""One log line for each transition of a lease or a provisional pin, without anything that a client chose or said.

A session appears as a short hash of its key, the same in all its lines.
"""

import hashlib
import logging
from collections.abc import Mapping
from typing import Final, Literal, TypeAlias

Transition: TypeAlias = Literal[
    "grant",
    "fork",
    "regain",
    "renew",
    "supersede",
    "rewind",
    "clip",
    "clip pin",
    "drop pin",
    "reject",
    "expire",
    "release",
    "revoke",
    "reset",
]

LOGGER: Final = logging.getLogger("vllm.bidikv.leases")
"""Below vLLM's own logger, whose handlers and level it has where vLLM runs."""

# What every turn does is for debugging; what ends or shortens a lease an operator wants to see.
_LEVELS: Final[Mapping[Transition, int]] = {
    "grant": logging.DEBUG,
    "fork": logging.DEBUG,
    "regain": logging.DEBUG,
    "renew": logging.DEBUG,
    "supersede": logging.DEBUG,
    "rewind": logging.DEBUG,
    "clip": logging.INFO,
    "clip pin": logging.INFO,
    "drop pin": logging.INFO,
    "reject": logging.INFO,
    "expire": logging.INFO,
    "release": logging.INFO,
    "revoke": logging.INFO,
    "reset": logging.INFO,
}


def log_transition(transition: Transition, key: tuple[str, str], *, num_blocks: int, reason: str | None = None) -> None:
    """Log a transition.

    Args:
        transition: what happened.
        key: the session (tenant, session id).
        num_blocks: that the lease or pin holds afterwards; those it held where it ended.
        reason: of the wire, where there is one.
    """
    level = _LEVELS[transition]
    if LOGGER.isEnabledFor(level):
        LOGGER.log(
            level,
            "Lease %s: %s, %d blocks%s",
            short_name(key),
            transition,
            num_blocks,
            f" ({reason})" if reason else "",
        )


def short_name(key: tuple[str, str]) -> str:
    """Return eight hexadecimal digits that stand for a session in logs."""
    return hashlib.sha256("\0".join(key).encode(errors="surrogatepass")).hexdigest()[:8]
