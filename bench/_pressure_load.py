"""The load of the pressure run: which sessions and which other requests come, and when. Pure, and the same in all arms.

Sessions: `num_slots` agents work at the same time, each through sessions of `TURNS_PER_SESSION` turns, one after the
other; turns come at a fixed rate, whatever the number of agents, so only what could be held grows with the load. How
fast that is depends on the machine (`Pace`): on one that cannot keep up, queues would decide everything.
Others: plain completions without a session, some streams at a time; each begins with the prompt of one of a few apps.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from bidikv_sdk.prefix import num_blocks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

BLOCK_SIZE: Final = 32
POOL_BLOCKS: Final = 127
"""Of D and of P; vLLM's null block is one more."""
MAX_MODEL_LEN: Final = 1536
PERCENTS: Final = (120, 200, 400)
"""What the sessions would hold, of D's pool."""

TURNS_PER_SESSION: Final = 4
ANSWER_TOKENS: Final = 8
_SYSTEM_WORDS: Final = 250
_DELTA_WORDS: Final = 32
_TURNS: Final = 72
"""Of one measurement, about."""
_IN_PROGRESS: Final = 0.8
"""Turns that run at a time, on average, where nothing is held."""

NUM_OTHERS: Final = 5
"""Streams of others at a time."""
OTHER_TOKENS: Final = 128
"""Length of each one's answer."""
_NUM_APPS: Final = 8
_APP_TOKENS: Final = 256
_OWN_TOKENS: Final = 48

# Each is one token behind a space, so that lengths are known.
_WORDS: Final = ("apple", "river", "stone", "cloud", "light", "house", "green", "paper", "music", "water", "field")
_FIRST_ID, _LAST_ID = 1000, 40000


@dataclass(frozen=True, slots=True)
class Session:
    """One session of a slot, and what is said in it."""

    slot: int
    number: int
    num_turns: int

    @property
    def system(self) -> str:
        """Its system prompt; it differs from all others in the first block."""
        return f"slot {self.slot} session {self.number}: " + self._text(0, _SYSTEM_WORDS)

    def delta(self, turn: int) -> str:
        """What is new in a turn, from 1."""
        return self._text(turn, _DELTA_WORDS)

    def _text(self, part: int, num_words: int) -> str:
        return " ".join(random.Random(f"{self.slot}/{self.number}/{part}").choices(_WORDS, k=num_words))


def sessions_of(slot: int) -> Iterator[Session]:
    """Yield a slot's sessions. The first ones are of different lengths, so that not all slots begin anew at once."""
    yield Session(slot, 0, TURNS_PER_SESSION - slot % (TURNS_PER_SESSION - 1))
    number = 1
    while True:
        yield Session(slot, number, TURNS_PER_SESSION)
        number += 1


def num_slots(percent: int, tokenize: Callable[[str], list[int]]) -> int:
    """Return how many sessions at a time hold `percent` of the pool already after their first turns."""
    ids = first_prompt(Session(0, 0, TURNS_PER_SESSION), tokenize)
    blocks = num_blocks(len(ids) + ANSWER_TOKENS - 1, BLOCK_SIZE)
    return -(-percent * POOL_BLOCKS // (100 * blocks))


@dataclass(frozen=True, slots=True)
class Pace:
    """How fast requests come.

    - `turns_per_s`: turns of sessions.
    - `duration_s`: new requests come for so long.
    - `grace_s`: what is not answered so long after that, counts as unanswered.
    """

    turns_per_s: float
    duration_s: float
    grace_s: float

    @property
    def ttl_s(self) -> int:
        """How long leases live: while so many turns come, every session of the highest load has had its turn."""
        return round(60 / self.turns_per_s)

    @classmethod
    def of(cls, turn_s: float, other_s: float) -> Pace:
        """Return that of a machine.

        Args:
            turn_s: what a turn takes there, beside the others and no other turn.
            other_s: what a request of the others takes.
        """
        turns_per_s = _IN_PROGRESS / turn_s
        return cls(turns_per_s, _TURNS / turns_per_s, 3 * other_s)


FIRST_PACE: Final = Pace(0.5, 20.0, 40.0)
"""Slow enough for any machine, to find out what its own is."""


def arrivals(slots: int, pace: Pace) -> list[tuple[float, int]]:
    """Return when turns come and in which slots, in order: every slot once before any comes again, in mixed order."""
    chance = random.Random(slots)
    at_s = 0.0
    events: list[tuple[float, int]] = []
    while True:
        for slot in chance.sample(range(slots), slots):
            at_s += chance.uniform(0.5, 1.5) / pace.turns_per_s
            if at_s >= pace.duration_s:
                return events
            events.append((at_s, slot))


def first_prompt(session: Session, tokenize: Callable[[str], list[int]]) -> list[int]:
    """Return a session's first prompt, rendered as the model's chat template does."""
    return tokenize(f"<|im_start|>system\n{session.system}{_turn(session.delta(1))}")


def next_prompt(
    prompt_ids: list[int], answer_ids: list[int], delta: str, tokenize: Callable[[str], list[int]]
) -> list[int]:
    """Return the prompt of a later turn: all that was said, token for token, and the delta."""
    return prompt_ids + answer_ids + tokenize(_turn(delta))


def _turn(delta: str) -> str:
    return f"<|im_end|>\n<|im_start|>user\n{delta}<|im_end|>\n<|im_start|>assistant\n"


def other_prompt(stream: int, number: int) -> list[int]:
    """Return the prompt of a stream's request: one of the apps', and what is this request's own."""
    app = random.Random(f"{stream}/{number}").randrange(_NUM_APPS)
    return _ids(f"app {app}", _APP_TOKENS) + _ids(f"{stream}/{number}/own", _OWN_TOKENS)


def _ids(seed: str, num_tokens: int) -> list[int]:
    return random.Random(seed).choices(range(_FIRST_ID, _LAST_ID), k=num_tokens)
