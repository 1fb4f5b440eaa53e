"""What a soak does, drawn before it: sessions that fit a small model, their texts, and when which fault happens. Pure.

`made_up` and `recorded` are the sessions, `kills` and `other_faults` draw the faults. May import `server_ext.traffic`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Final

from server_ext.traffic import SMALL, Workload, fitted, generate

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from random import Random

    from server_ext.launch.command import Role
    from server_ext.traffic import PlannedSession

MAX_TOKENS: Final = 2400
"""Longest prompt with its answer that is planned; texts come out a little longer or shorter than planned."""
MAX_OUTPUT_TOKENS: Final = 64
_ROOM: Final = {"max_tokens": MAX_TOKENS, "max_output_tokens": MAX_OUTPUT_TOKENS}
TIME_DIVISOR: Final = SMALL.time_divisor
"""All gaps, and with them the lives of leases, are divided by this."""

MEASURED_FROM_S: Final = 300.0
"""From here on memory is watched; in a shorter run from its middle."""
# Each start of an engine takes half a minute, and then as long again until its memory has been touched once.
_KILLS_UNTIL: Final = 0.75
_S_PER_KILL: Final = 70.0

OTHER_FAULTS: Final = {
    "call to P cut": 3.0,
    "call to P reset": 2.0,
    "call to P stalled": 2.0,
    "answer of P cut": 3.0,
    "answer of P reset": 2.0,
    "answer of P stalled": 2.0,
    "lease released": 3.0,
    "session ended": 1.0,
    "cache reset on P": 1.0,
    "cache reset on D": 1.0,
    "crowd on D": 2.0,
    "P stopped": 1.0,
    "D stopped": 1.0,
}
"""Faults by name, and how often each happens beside the others; clients that leave and kills are drawn apart."""

WORDS: Final = ("apple", "river", "stone", "cloud", "house", "light", "paper", "music", "water", "green")


@dataclass(frozen=True)
class Kill:
    """An engine dies, and is started again on its ports."""

    at_s: float
    role: Role


def measured_from_s(duration_s: float) -> float:
    """Return from when on memory is watched, in seconds from the start."""
    return min(MEASURED_FROM_S, duration_s / 2)


def kills(random: Random, duration_s: float) -> list[Kill]:
    """Draw when engines die: before memory is watched, in turns, and one at least in any run."""
    until_s = _KILLS_UNTIL * measured_from_s(duration_s)
    number = max(1, int(until_s / _S_PER_KILL))
    roles: tuple[Role, Role] = random.choice((("prefill", "decode"), ("decode", "prefill")))
    part_s = until_s / number
    return [Kill((index + random.uniform(0.1, 0.6)) * part_s, roles[index % 2]) for index in range(number)]


def leaves_time(at_s: float, longest_start_s: float, duration_s: float) -> bool:
    """Tell whether an engine that is killed now would be back before memory is watched.

    Args:
        at_s: now, in seconds from the start of the run.
        longest_start_s: what starting an engine took in this run, at the most so far; 0 where none was started.
        duration_s: of the run.
    """
    return at_s + longest_start_s <= measured_from_s(duration_s)


def other_faults(random: Random, mean_gap_s: float) -> Iterator[tuple[float, str]]:
    """Yield faults without end: how long to wait after the one before, and its name."""
    while True:
        (name,) = random.choices(list(OTHER_FAULTS), list(OTHER_FAULTS.values()))
        yield random.expovariate(1 / mean_gap_s), name


def made_up(seed: int) -> Iterator[PlannedSession]:
    """Yield sessions without end, as recorded agents' are, for a small model."""
    workload: Workload = replace(SMALL, system_tokens=256, first=SMALL.first.divided(2)).fitting(MAX_TOKENS)
    number = 0
    while True:
        for session in generate(workload, 100, seed=seed + number, rate_per_s=None):
            yield fitted(session, **_ROOM)
        number += 1_000_000  # far from any seed that somebody gives


def recorded(sessions: Sequence[PlannedSession]) -> Iterator[PlannedSession]:
    """Yield recorded sessions, again and again, with their gaps divided and their tokens made to fit.

    Raises:
        ValueError: there is none.
    """
    if not sessions:
        msg = "the traces have no session"
        raise ValueError(msg)
    while True:
        for session in sessions:
            yield fitted(session, **_ROOM, time_divisor=TIME_DIVISOR)


def text_of(random: Random, num_tokens: int) -> str:
    """Return a text of about so many tokens, one word each."""
    return " ".join(random.choice(WORDS) for _ in range(max(1, num_tokens)))


def kept(messages: Sequence[dict[str, str]], num_tokens: int, num_of: Sequence[int]) -> list[dict[str, str]]:
    """Return the messages that lie within the first tokens of a history, the last one cut where it does not.

    Args:
        messages: of the history, in order.
        num_tokens: that stay, at least.
        num_of: tokens of each message.
    """
    ends = [0]
    for number in num_of:
        ends.append(ends[-1] + number)
    result = []
    for message, (start, end) in zip(messages, pairwise(ends), strict=True):
        if end <= num_tokens:
            result.append(message)
            continue
        pieces = message.get("content", "").split(" ")
        share = max(0.0, (num_tokens - start) / (end - start))
        if num_kept := int(share * len(pieces)):
            result.append({**message, "content": " ".join(pieces[:num_kept])})
        break
    return result
