"""Draws cases for `test_drawn`, and says what each must come to: a tiny model of both caches, without bidikv's code.

A case is one turn of a session: what P has of its own before it, how the prompt leaves what D holds, which way it goes,
how its answer ends, and what becomes of the lease after it, which the next case starts from.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from collections.abc import Sequence
    from random import Random

NUM_TURNS = 8
"""Cases of one session, behind the turn that opens it."""

MIN_FETCH_TOKENS = 64
EOS = 2  # <|im_end|>


@dataclass(frozen=True)
class Case:
    """One turn.

    - `prefix`: what P has in its own prefix cache, of the history that D has or of the coming prompt.
    - `change`: how the prompt comes from the history; `by` is the way of saying so.
    - `at`, `prefix_at`: where in the history, as a part of it.
    - `num_words`: of the new message.
    - `aim`: what shall end so many tokens from a block's boundary, the prompt or what D then holds; None for anything.
    - `route`: forced.
    - `end`: of the answer, after `num_tokens` at most.
    - `then`: what becomes of the lease.
    """

    prefix: Literal["as it was", "none", "shorter", "same", "longer", "diverging"]
    prefix_at: float
    change: Literal["append", "rewind", "fork", "edit", "cut", "again", "new"]
    by: Literal["turn", "chat", "replace"]
    at: float
    num_words: int
    aim: tuple[Literal["prompt", "held"], int] | None
    route: Literal["fetch", "prefill", "local", "recompute"]
    end: Literal["length", "stop string", "own end"]
    num_tokens: int
    then: Literal["kept", "released", "expired", "revoked"]

    def sampling(self) -> dict[str, Any]:
        """Return how the answer is generated, but for its length and stop strings."""
        sampling: dict[str, Any] = {"temperature": 0}
        if self.end == "own end":
            sampling |= {"min_tokens": self.num_tokens - 1, "logit_bias": {str(EOS): 100}}
        return sampling


def draw(random: Random) -> Case:
    """Draw one case."""

    def one_of(**weights: float) -> Any:
        (name,) = random.choices([name.replace("_", " ") for name in weights], list(weights.values()))
        return name

    change = one_of(append=8, rewind=1, fork=1, edit=4, cut=2, again=1, new=1)
    ways = {"append": ("turn", "turn", "chat"), "edit": ("chat", "replace"), "cut": ("chat", "replace")}
    end = one_of(length=6, stop_string=3, own_end=1)
    return Case(
        prefix=one_of(as_it_was=2, none=3, shorter=2, same=1, longer=2, diverging=2),
        prefix_at=random.random(),
        change=change,
        by=random.choice(ways.get(change, ("chat",) if change in {"again", "new"} else ("turn",))),
        at=random.random(),
        num_words=random.choice((1, 2, 8, 30, 60, 90)),
        aim=random.choice((None, *((what, by) for what in ("prompt", "held") for by in (-1, 0, 1)))),
        route=one_of(fetch=8, prefill=1, local=1.5, recompute=1),
        end=end,
        num_tokens=24 if end == "stop string" else random.randint(2, 10),
        then=one_of(kept=14, released=1, expired=1, revoked=1.5),
    )


def num_common(a: Sequence[int], b: Sequence[int]) -> int:
    """Return how many tokens two sequences begin with alike."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


class PrefixCache:
    """What an engine's own prefix cache can serve: full blocks of what it has computed since the last reset."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._computed: list[list[int]] = []

    def reset(self) -> None:
        """Forget everything."""
        self._computed.clear()

    def add(self, token_ids: Sequence[int]) -> None:
        """Note what has been computed."""
        self._computed.append(list(token_ids))

    def num_tokens(self) -> int:
        """Return all tokens that were noted."""
        return sum(map(len, self._computed))

    def num_hit(self, prompt_ids: Sequence[int]) -> int:
        """Return how much of a prompt is found; its last token is always computed."""
        longest = max((num_common(ids[: self.whole(len(ids))], prompt_ids) for ids in self._computed), default=0)
        return self.whole(min(longest, len(prompt_ids) - 1))

    def whole(self, num_tokens: int) -> int:
        """Return the tokens in full blocks."""
        return num_tokens // self._block_size * self._block_size


@dataclass
class Held:
    """What D's lease holds.

    - `reason`: why it is not all of the history; None where it is.
    - `lost`: what a lease that is gone has left in D's prefix cache at most.
    """

    token_ids: list[int]
    reason: str | None = None
    lost: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Expected:
    """What a turn's report must say."""

    outcome: str
    held_tokens: int
    diverged_at: int | None
    reused_tokens: int
    fetched_tokens: int


def expected(case: Case, prompt_ids: Sequence[int], held: Held, num_local: int) -> Expected:
    """Say what a turn comes to.

    Args:
        case: the turn.
        prompt_ids: [num_tokens], its prompt.
        held: D's lease.
        num_local: tokens that the engine which computes the prompt finds in its own prefix cache.
    """
    num_held = len(held.token_ids)
    num_matched = num_common(held.token_ids, prompt_ids)
    has_ticket = case.route == "fetch" and num_matched >= MIN_FETCH_TOKENS
    num_reused = 0 if case.route == "recompute" else num_local
    num_fetched = max(num_matched - num_reused, 0) if has_ticket else 0
    reused = "local" if case.route == "local" else "prefilled"
    return Expected(
        outcome="fetched" if num_fetched else reused if num_reused else "recomputed",
        held_tokens=num_held,
        diverged_at=num_matched if num_matched < min(num_held, len(prompt_ids)) else None,
        reused_tokens=num_reused,
        fetched_tokens=num_fetched,
    )


def expected_reason(case: Case, expected: Expected, held: Held, num_matched: int, *, first_change: str | None) -> str:
    """Say why a turn came as it did.

    Args:
        case: the turn.
        expected: its other facts.
        held: D's lease.
        num_matched: tokens of it with which the prompt begins.
        first_change: what the caller has changed of the session, "messages" or "system"; None for nothing.
    """
    if case.route != "fetch":
        return "forced"
    if expected.diverged_at is not None:
        return f"{first_change or 'messages'}_changed"
    if held.reason is not None:
        return held.reason
    return "below_threshold" if 0 < num_matched < MIN_FETCH_TOKENS else "forced"
