"""The fault matrix: every fault at every point of a turn where it can happen, on two real engines (`make faults`).

Each row is produced at its point, which `_scene` holds: a fault that did not happen there ends the run with an error.
After each, block accounting is back at its baseline, no read was stale, both engines are alive, and the next turn is
right and goes the right way; where not, or where the matrix takes longer than it may, the exit status is 1. Writes
`out/faults.json` and `docs/faults.md`.
"""

from __future__ import annotations

import argparse
import json
import re
import signal
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench._fault_table import LONGEST_S, table
from bench._faults import (
    client_gone,
    clients_gone,
    control_late,
    crowded,
    d_killed,
    d_stopped,
    d_stopped_until_hold_over,
    d_stopped_while_p_computes,
    d_stopped_while_p_reads,
    delayed,
    expired,
    hold_over,
    killed_in_a_read,
    p_killed,
    p_stopped,
    p_stopped_until_hold_over,
    p_stopped_while_d_reads,
    queued_longer_than_hold,
    refused,
    released,
    reset,
    revoked,
    ticket_late,
    turn_too_long,
    wire,
)
from bench._machine import versions
from bench._scene import BETWEEN_TURNS, Row, Scene, require
from server_ext.launch.command import ROLES
from tests.engine.rig import Plan, Rig
from tests.engine.talk import words
from tests.engine.wire import Break

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from server_ext.launch.command import Role
    from tests.engine.wire import Way

ROOT = Path(__file__).parents[1]
PLAN = Plan(
    settings={
        "budget_fraction": 1.0,
        # Shorter than D's patience with P, so that a read can outlive its ticket.
        "ticket_ttl_s": 10.0,
        "ticket_grace_s": 0.5,
        "prefill_timeout_s": 14.0,
        "provisional_ttl_s": 3.0,
        "default_ttl_s": 600.0,
        "turn_timeout_s": 30.0,
        "control_timeout_s": 5.0,
    },
    gated=True,
    braked=True,
)


@dataclass(frozen=True)
class Case:
    """One fault at one or more points; several share what the fault costs to repair."""

    fault: str
    points: tuple[str, ...]
    run: Callable[[Scene], None]
    options: dict[str, Any] = field(default_factory=dict)


# A home that knows no session any more: the SDK opens it again. These two alone cost a session its history.
HOME_LOST = {"by_sdk": True, "history_lost": "home_lost"}
ENDED = {"history_lost": "first_turn"}
BAD_MESSAGE = [{"role": "user", "content": None}]
# Where a client may leave, and which engine's request must end by an abort then.
LEAVING: tuple[tuple[str, Role | None], ...] = (
    ("before load", None),
    ("before begin", None),
    ("after begin", None),
    ("P has it queued", "prefill"),
    ("P reads", "prefill"),
    ("P computes", "prefill"),
    ("P answered", None),
    ("D has it queued", "decode"),
    ("D reads", "decode"),
    ("D decodes", "decode"),
    ("at settle", None),
    ("settled", None),
)
NO_STREAM_YET = ("before load", "before begin", "P has it queued", "P answered", "D has it queued", "settled")
# How a direction of the wire fails: after so many bytes, and how. P's reply has some 600 bytes.
REQUESTS: tuple[tuple[int, Way], ...] = ((0, "cut"), (500, "cut"), (500, "reset"), (500, "hold"))
REPLIES: tuple[tuple[int, Way], ...] = ((0, "cut"), (60, "cut"), (300, "cut"), (300, "reset"), (300, "hold"))
WAYS = {"cut": "cut", "reset": "reset", "hold": "stalled"}
IN_THE_MIDDLE = ("P reads", "D reads")


def matrix() -> list[Case]:
    """Return all cases, in the order in which they run."""
    cases = [
        *(Case("client gone", (point,), client_gone(role)) for point, role in LEAVING),
        *(
            Case("client of a stream gone", (point,), client_gone(role), {"stream": True})
            for point, role in LEAVING
            if point not in NO_STREAM_YET
        ),
        Case("client gone, both engines reading", ("D reads", "P reads"), clients_gone),
        Case("request delayed", ("after begin",), delayed),
        Case("reply delayed", ("P answered",), delayed),
        *(
            Case(f"request {WAYS[way]} after {num} bytes", ("after begin",), wire(request=Break(num, way)))
            for num, way in REQUESTS
        ),
        *(
            Case(f"reply {WAYS[way]} after {num} bytes", ("P answered",), wire(reply=Break(num, way)))
            for num, way in REPLIES
        ),
        Case("cache reset on P", ("P reads",), reset("prefill", running=True, answer=None)),
        Case("preempted", ("P computes",), reset("prefill", running=True, answer=True)),
        Case("preempted", ("D decodes",), reset("decode", running=True, answer=True)),
        Case("cache reset", ("P reads",), reset("decode", running=False, answer=False)),
        Case("cache reset", ("D reads",), reset("decode", running=False, answer=False)),
        Case("cache reset", (BETWEEN_TURNS,), reset("decode", running=False, answer=True)),
        Case("lease expired", (BETWEEN_TURNS,), expired),
        *(Case("lease revoked", (point,), revoked) for point in ("D has it queued", BETWEEN_TURNS)),
        *(Case("lease released", (point,), released("release")) for point in (*IN_THE_MIDDLE, BETWEEN_TURNS)),
        *(Case("session ended", (point,), released("end"), ENDED) for point in IN_THE_MIDDLE),
        Case("memory pressure", ("P reads",), crowded),
        *(Case("ticket late", (point,), ticket_late) for point in ("P has it queued", "P reads")),
        # What waits for a deadline waits together.
        Case("turn too long", ("D has it queued", "D reads"), turn_too_long),
        *(Case("control call late", (point,), control_late) for point in ("before load", "before begin", "at settle")),
        Case("template error", ("before begin",), refused("invalid_request"), {"turn": {"delta": BAD_MESSAGE}}),
        Case(
            "context too long", ("before begin",), refused("context_length_exceeded"), {"turn": {"delta": words(1000)}}
        ),
        Case("P stopped", (BETWEEN_TURNS, "P reads", "P computes"), p_stopped),
        Case("P stopped", ("D posts its read",), p_stopped_while_d_reads),
        Case("D stopped", ("P posts its read",), d_stopped_while_p_reads),
        Case("D stopped", ("P computes",), d_stopped_while_p_computes),
        *(Case("D stopped", (point,), d_stopped) for point in ("D decodes", BETWEEN_TURNS)),
        *(Case("P's hold over", (point,), hold_over) for point in ("P answered", "D posts its read")),
        Case("queued longer than P's hold", ("D has it queued",), queued_longer_than_hold),
        Case("D stopped until P's hold is over", ("D has it queued",), d_stopped_until_hold_over),
        Case("P stopped until its hold is over", ("D posts its read",), p_stopped_until_hold_over),
        # A killed engine takes half a minute to come back: several turns meet each death.
        Case("P killed", (BETWEEN_TURNS, "P has it queued", "P reads", "P computes"), p_killed),
        Case("P killed", ("after begin", "D posts its read"), p_killed),
        Case("P killed", ("P answered", "D reads", "P posts its read"), p_killed),
        Case("P killed", ("D has it queued", "D decodes"), p_killed),
        Case("P killed", ("at settle",), p_killed),
        Case("P killed in its read", ("P posts its read",), killed_in_a_read("prefill", reader="prefill")),
        Case("D killed", (BETWEEN_TURNS, "P has it queued", "D reads", "D decodes"), d_killed, HOME_LOST),
        Case("D killed", ("after begin", "D has it queued", "P computes", "at settle"), d_killed, HOME_LOST),
        Case("D killed", ("P reads", "P answered", "P posts its read", "before begin"), d_killed, HOME_LOST),
        Case("D killed", ("D posts its read",), d_killed, HOME_LOST),
        Case("D killed in P's read", ("P posts its read",), killed_in_a_read("decode", reader="prefill"), HOME_LOST),
        Case("D killed in its read", ("D posts its read",), killed_in_a_read("decode", reader="decode"), HOME_LOST),
    ]
    pairs = [(case.fault, point) for case in cases for point in case.points]
    require(len(pairs) == len(set(pairs)), "a pair stands there twice")
    return cases


def play(rig: Rig, case: Case) -> list[Row]:
    """Run one case; where an engine died of it, that is what the rows say."""
    scene = Scene(rig, case.fault, case.points, **case.options)
    try:
        case.run(scene)
        return scene.rows()
    except Exception:
        if scene.are_alive():
            raise
        traceback.print_exc()
        mend(rig)
        return scene.rows_of_the_dead()


def play_all(rig: Rig, patterns: list[str]) -> tuple[list[Row], list[str]]:
    """Run the chosen cases, all where `patterns` is empty; return the rows, and what could not be produced."""
    rows: list[Row] = []
    failures: list[str] = []
    for case in matrix():
        name = f"{case.fault} @ {', '.join(case.points)}"
        if patterns and not any(re.search(pattern, name) for pattern in patterns):
            continue
        try:
            done = play(rig, case)
        except Exception:  # noqa: BLE001 - one case that cannot be produced must not hide the others
            traceback.print_exc()
            print(f"NOT PRODUCED: {name}", flush=True)
            failures.append(name)
            mend(rig)
            continue
        rows += done
        for row in done:
            print(f"{'ok ' if row.is_good() else 'BAD'} {row}", flush=True)
    return rows, failures


def main() -> int:
    """Run the matrix, or a part of it, and write what came of it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("patterns", nargs="*", help="run only cases `fault @ points` in which one of these is found")
    patterns = parser.parse_args().patterns
    signal.signal(signal.SIGTERM, leave_in_order)
    started_s = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        rig = Rig.start(Path(folder), PLAN)
        try:
            rows, failures = play_all(rig, patterns)
        finally:
            rig.close()
    took_s = time.monotonic() - started_s
    num_bad = sum(not row.is_good() for row in rows)
    print(f"{len(rows)} pairs, {num_bad} bad, {len(failures)} not produced, {took_s:.0f} s (at most {LONGEST_S:.0f})")
    if not patterns:
        (ROOT / "out").mkdir(exist_ok=True)
        (ROOT / "out" / "faults.json").write_text(json.dumps([row.to_json() for row in rows], indent=1) + "\n", "utf-8")
        if not failures:
            (ROOT / "docs" / "faults.md").write_text(table(rows, took_s, versions()), "utf-8")
    return 0 if is_good(rows, failures, took_s) else 1


def is_good(rows: Sequence[Row], failures: Sequence[str], took_s: float) -> bool:
    """Tell whether every fault was produced, none did harm, and all of it was over in time."""
    return all(row.is_good() for row in rows) and not failures and took_s <= LONGEST_S


def leave_in_order(*_: object) -> None:
    """End the engines on the way out: they are sessions of their own, and would outlive this process."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a second one must not stop that half-way
    sys.exit(143)


def mend(rig: Rig) -> None:
    """Bring both engines back to a known state, whatever happened to them."""
    rig.brakes.forget()
    for role in ROLES:
        rig.stack.kill(role, signal.SIGCONT)
        rig.restart(role)


if __name__ == "__main__":
    sys.exit(main())
