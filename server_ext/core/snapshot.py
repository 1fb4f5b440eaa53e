"""A home's metrics at one moment, as plain values. Reads both tables and changes neither."""

from typing import TYPE_CHECKING

from .metrics import BLOCKS, BYTES, LEASES, OPEN_TICKETS, PINNED, SESSION_BYTES, SESSIONS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from .holdings import Holdings
    from .metrics import Series, Snapshot
    from .ports import BlockPins
    from .sessions import SessionTable


def of_leases(held: "Holdings", pins: "BlockPins", *, block_bytes: int) -> "Snapshot":
    """Return the metrics of leases, tickets and blocks; `block_bytes` is the memory of one block."""
    num_running = sum(turn.key in held.leases for turn in held.turns.values())
    holders = held.num_blocks_by_holder()
    blocks = {
        "leased": holders["lease"],
        "provisional": holders["provisional"],
        "ticketed": holders["ticket"],
        "free": pins.num_free_blocks(),
        "total": pins.num_total_blocks(),
    }
    block_seconds = held.block_seconds_by_holder()
    leases = {
        "idle": len(held.leases) - num_running,
        "running": num_running,
        "provisional": sum(1 for _ in held.pins_of_turns()),
    }
    return held.counts.snapshot() | {
        LEASES.name: _series(leases),
        BLOCKS.name: _series(blocks),
        BYTES.name: _series({state: count * block_bytes for state, count in blocks.items()}),
        OPEN_TICKETS.name: [([], float(len(held.tickets)))],
        PINNED.name: _series({holder: block_seconds.get(holder, 0.0) * block_bytes for holder in holders}),
    }


def of_sessions(sessions: "SessionTable") -> "Snapshot":
    """Return the metrics of session records."""
    num_running = sessions.num_running
    return {
        SESSIONS.name: _series({"idle": len(sessions) - num_running, "running": num_running}),
        SESSION_BYTES.name: [([], float(sessions.num_bytes))],
    }


def _series(values: "Mapping[str, float]") -> "list[Series]":
    return [([label], float(value)) for label, value in values.items()]
