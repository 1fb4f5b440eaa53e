"""What the agents of a benchmark do: the same conversations for every arm, drawn from a seed. Pure.

`Scenario.scripts(round)` turns planned sessions into text: common words, about a token each.
"""

from __future__ import annotations

import bisect
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from server_ext.traffic import PlannedSession, PlannedTurn, prompts

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterable, Sequence

# Common enough to be one token each in most vocabularies.
_WORDS: Final = tuple(
    word
    for line in (
        "the of and to in is for that it was on with as be by at this have from or had not are but what all were when",
        "we there can an your which their said if do will each about how up out them then she many some so these would",
        "other into has more her two like him see time could no make than first been its who now people my made over",
        "down only way find use may water long little very after words called just where most know get through back",
    )
    for word in line.split()
)
# Ordinary tokens of every vocabulary that is not tiny.
_CROWD_IDS: Final = range(1_000, 30_000)
_SYSTEM_SHARE: Final = 0.5
"""Of a first prompt, what is the system's; the rest is the user's."""


@dataclass(frozen=True, slots=True)
class Ask:
    """One turn that an agent will ask."""

    delta: str
    """What the user or the tool says."""
    output_tokens: int
    gap_s: float
    """Seconds between the end of the turn before and this one."""
    rewind_to: int | None
    """Number of turns that stay before this one; None for all, which is an agent that only appends."""
    is_measured: bool = True
    """False for a turn that only makes the history longer: it is sent, and left out of the figures of later turns."""
    crowd: tuple[tuple[int, ...], ...] = ()
    """Prompts of other sessions, as token ids, that the prefill engine computes before this turn."""


@dataclass(frozen=True, slots=True)
class Script:
    """One agent's conversation; `number` counts within the round."""

    number: int
    start_s: float
    system: str
    asks: tuple[Ask, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """Conversations of one kind.

    - `plan`: sessions of one round, from a seed of that round.
    - `arms`: names of the arms that run it; the first one is what the others are compared with.
    - `at_once`: how many agents run at the same time; None for all that have started (open loop).
    - `turns_beside`: numbers of those turns of each agent during which other requests decode on the same engines.
    - `num_beside`: how many such requests; agents must run one by one then.
    - `points`: history lengths, in tokens, at which later turns are reported apart.
    - `max_delta`: a later turn that adds more words than this only makes the history longer; None measures all.
    - `num_crowd`: other sessions whose prompts the prefill engine computes before each later turn.
    - `crowd_tokens`: of each such prompt.

    Raises:
        ValueError: requests beside several agents.
    """

    name: str
    what: str
    plan: Callable[[int], Iterable[PlannedSession]]
    arms: tuple[str, ...]
    at_once: int | None = 1
    turns_beside: Container[int] = ()
    num_beside: int = 0
    points: tuple[int, ...] = ()
    max_delta: int | None = None
    num_crowd: int = 0
    crowd_tokens: int = 0

    def __post_init__(self) -> None:
        if self.num_beside and self.at_once != 1:
            msg = f"scenario {self.name}: requests beside the agents need at_once=1, got {self.at_once}"
            raise ValueError(msg)

    def scripts(self, round_number: int, *, seed: int) -> list[Script]:
        """Return one round's conversations, with text."""
        # The same in every process: Python's own hash of a string is not.
        draw = random.Random(f"{self.name}/{seed}/{round_number}")  # noqa: S311 (made-up text)
        sessions = self.plan(draw.randrange(1 << 31))
        return [self._script(number, session, draw) for number, session in enumerate(sessions)]

    def _script(self, number: int, session: PlannedSession, draw: random.Random) -> Script:
        first = session.turns[0].delta_tokens
        num_system = int(first * _SYSTEM_SHARE)
        asks: list[Ask] = []
        contexts: list[int] = []
        for turn, (prompt, kept) in zip(session.turns, prompts(session), strict=True):
            # What was edited begins anew behind the last turn that stays whole.
            stays = len(contexts) if turn.kept_tokens is None else bisect.bisect_right(contexts, kept)
            rewind_to = None if stays == len(contexts) else stays
            before = contexts[stays - 1] if stays else num_system
            delta = _words(prompt - before, draw)
            is_measured = not asks or self.max_delta is None or prompt - before <= self.max_delta
            crowd = tuple(_ids(self.crowd_tokens, draw) for _ in range(self.num_crowd if asks else 0))
            asks.append(Ask(delta, turn.output_tokens, turn.gap_s, rewind_to, is_measured, crowd))
            contexts = [*contexts[:stays], prompt + turn.output_tokens]
        return Script(number, session.start_s, _words(num_system, draw), tuple(asks))


def growing(
    first_tokens: Sequence[int], *, num_turns: int, delta_tokens: tuple[int, int], output_tokens: int
) -> Callable[[int], list[PlannedSession]]:
    """Plan agents that grow evenly.

    Args:
        first_tokens: [agents], of their first prompts.
        num_turns: of each, the first included.
        delta_tokens: least and most that a later turn adds.
        output_tokens: of each answer.
    """

    def plan(seed: int) -> list[PlannedSession]:
        draw = random.Random(seed)  # noqa: S311 (made-up load)
        return [
            PlannedSession(
                0.0,
                tuple(
                    PlannedTurn(0.0, turn > 0, draw.randint(*delta_tokens) if turn else first, output_tokens)
                    for turn in range(num_turns)
                ),
            )
            for first in first_tokens
        ]

    return plan


def stepping(
    points: Sequence[int], *, turns_at_each: Sequence[int], delta_tokens: tuple[int, int], output_tokens: int
) -> Callable[[int], list[PlannedSession]]:
    """Plan one agent whose history is brought to one length after the other, with some short turns at each.

    Computing a long first prompt once for each length would take most of a benchmark's time.

    Args:
        points: [lengths], in tokens, of the prompt that comes to each; the first one is the first prompt.
        turns_at_each: [lengths], how many short turns follow there.
        delta_tokens: least and most that a short turn adds.
        output_tokens: of each answer.

    Raises:
        ValueError: the history has outgrown a point before it comes to it.
    """

    def plan(seed: int) -> list[PlannedSession]:
        draw = random.Random(seed)  # noqa: S311 (made-up load)
        turns: list[PlannedTurn] = []
        context = 0
        for point, num_short in zip(points, turns_at_each, strict=True):
            if point <= context:
                msg = f"the history has {context} tokens before it shall come to {point}; ask for fewer turns"
                raise ValueError(msg)
            deltas = [point - context, *(draw.randint(*delta_tokens) for _ in range(num_short))]
            turns += [PlannedTurn(0.0, bool(turns) or at > 0, delta, output_tokens) for at, delta in enumerate(deltas)]
            context += sum(deltas) + len(deltas) * output_tokens
        return [PlannedSession(0.0, tuple(turns))]

    return plan


def _words(num: int, draw: random.Random) -> str:
    return " ".join(draw.choices(_WORDS, k=max(num, 1)))


def _ids(num: int, draw: random.Random) -> tuple[int, ...]:
    return tuple(draw.choices(_CROWD_IDS, k=num))


@dataclass(frozen=True, slots=True)
class Continuation:
    """How a turn's prompt is made from the turn before it."""

    num_dropped: int
    """Tokens at the end of the answer that do not stay: half a character, or a special token that ended it."""
    token_ids: list[int]
    """[num_new], what comes behind the others."""

    def prompt(self, history: Sequence[int]) -> list[int]:
        """Return the prompt's token ids behind a history: the prompt and the answer of the turn before."""
        return [*history[: len(history) - self.num_dropped], *self.token_ids]


def find_continuation(prompt: Sequence[int], before: Sequence[int], answer: Sequence[int]) -> Continuation:
    """Tell how a turn continues the one before it.

    Args:
        prompt: of the turn.
        before: the prompt of the turn that it continues; empty for none.
        answer: of that turn.

    Raises:
        ValueError: The prompt does not begin with the one before it.
    """
    history = [*before, *answer]
    num_kept = next((at for at, (one, old) in enumerate(zip(prompt, history, strict=False)) if one != old), None)
    num_kept = min(len(prompt), len(history)) if num_kept is None else num_kept
    if num_kept < len(before):
        msg = (
            f"a turn's prompt differs from the one before it at token {num_kept} of {len(before)}; use a model whose "
            "template only appends"
        )
        raise ValueError(msg)
    return Continuation(len(history) - num_kept, list(prompt[num_kept:]))
