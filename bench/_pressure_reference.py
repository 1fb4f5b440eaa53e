"""The judge of all answers: the same prompts, computed by stock vLLM with nothing cached.

`References.compute` asks for all of them at once, when the measurements are over; `verdict` compares.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from bench._reference import Verdict, judge
from server_ext.launch.command import ROLES

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from bench._pressure_arms import Pair
    from bench._pressure_cell import Cell
    from server_ext.launch.command import Role

_AT_A_TIME: Final = 8


def answers(cells: Iterable[Cell]) -> list[tuple[list[int], list[int]]]:
    """Return prompt and tokens of everything that was answered, also in part."""
    found = []
    for cell in cells:
        found += [(other.prompt_ids, other.token_ids) for other in cell.others]
        found += [(one.answer.prompt_ids, one.answer.token_ids) for one in cell.asked if one.answer is not None]
    return found


class References:
    """Verdicts on answers."""

    def __init__(self, verdicts: dict[tuple[tuple[int, ...], tuple[int, ...]], Verdict]) -> None:
        self._verdicts = verdicts

    @classmethod
    async def compute(cls, pair: Pair, given: Iterable[tuple[Sequence[int], Sequence[int]]]) -> References:
        """Compute what a stock pair answers to each prompt, as long as the longest answer that was given.

        Both engines compute, for each is a whole vLLM. What differs is looked at token by token, for two tokens may be
        equally likely but for rounding.
        """
        pairs = {(tuple(prompt_ids), tuple(token_ids)) for prompt_ids, token_ids in given}
        lengths: dict[tuple[int, ...], int] = {}
        for prompt, answer in pairs:
            lengths[prompt] = max(lengths.get(prompt, 0), len(answer))
        right = await _generate_all(pair, [(prompt, length) for prompt, length in lengths.items() if length])
        verdicts = {}
        for prompt, answer in pairs:
            if list(answer) == right.get(prompt, [])[: len(answer)]:
                verdicts[prompt, answer] = Verdict(0, 0)
            else:
                verdicts[prompt, answer] = await asyncio.to_thread(judge, prompt, answer, pair.generate)
        return cls(verdicts)

    def verdict(self, prompt_ids: Sequence[int], token_ids: Sequence[int]) -> Verdict:
        """Return how an answer that was given compares."""
        return self._verdicts[tuple(prompt_ids), tuple(token_ids)]


async def _generate_all(pair: Pair, waiting: list[tuple[tuple[int, ...], int]]) -> dict[tuple[int, ...], list[int]]:
    right: dict[tuple[int, ...], list[int]] = {}

    async def work(role: Role) -> None:
        while waiting:
            prompt, length = waiting.pop()
            right[prompt] = (await pair.complete(role, list(prompt), length))["token_ids"]

    await asyncio.gather(*(work(role) for role in ROLES for _ in range(_AT_A_TIME)))
    return right
