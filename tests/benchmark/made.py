"""Made-up arms, for tests of what runs them."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from bidikv_sdk import CacheReport
from bidikv_sdk.wire import Timings
from server_ext.benchmark.arms import Said, WarmUp
from server_ext.benchmark.samples import Sample

if TYPE_CHECKING:
    from server_ext.benchmark.scenarios import Ask, Script


def cache_report(**changed) -> CacheReport:
    """A report of a fetched turn."""
    fields = {
        "outcome": "fetched",
        "reason": "cheapest",
        "prompt_tokens": 100,
        "held_tokens": 90,
        "reused_tokens": 0,
        "fetched_tokens": 90,
        "computed_tokens": 10,
        "diverged_at": None,
        "timings_s": Timings(
            render=0.001, begin=0.002, prefill=0.1, fetch=0.01, handover=0.02, settle=0.003, ttft=0.13
        ),
    }
    return CacheReport(**{**fields, **changed})


def sample(arm: str = "fetch", **changed) -> Sample:
    """A turn of an arm."""
    fields = {
        "arm": arm,
        "round": 0,
        "session": 0,
        "turn": 2,
        "beside": False,
        "ttft_s": 0.2,
        "gaps_s": (0.01, 0.01),
        "prompt_tokens": 100,
        "fetched_tokens": 90,
        "computed_tokens": 10,
        "prompt_ids": (1, 2, 3),
        "token_ids": (4,),
    }
    return Sample(**{**fields, **changed})


@dataclass
class MadeAgent:
    """An agent that answers with its turn's number, behind all that was asked and answered."""

    arm: MadeArm
    script: Script
    histories: list[list[int]] = field(default_factory=list)

    async def run(self, ask: Ask) -> Said:
        """Answer one turn."""
        await asyncio.sleep(0)
        if self.arm.fails_behind is not None and self.arm.num_turns == self.arm.fails_behind:
            msg = "gone"
            raise ConnectionError(msg)
        self.arm.num_turns += 1
        if ask.rewind_to is not None:
            del self.histories[ask.rewind_to :]
        history = self.histories[-1] if self.histories else []
        prompt = [*history, *(len(word) for word in ask.delta.split())]
        answer = [1000 + len(self.histories) + self.arm.shift]
        self.histories.append([*prompt, *answer])
        self.arm.log.append(("turn", self.arm.name, self.script.number))
        return Said(0.1, [0.01], prompt, answer, cache_report(prompt_tokens=len(prompt)) if self.arm.tells else None)

    async def close(self) -> None:
        """End."""
        self.arm.log.append(("close", self.arm.name, self.script.number))


@dataclass
class MadeArm:
    """An arm without engines; with a `shift` its answers are wrong."""

    name: str
    log: list[tuple[str, str, int]]
    shift: int = 0
    tells: bool = True
    counted: float = 0.0
    engines: object = None
    fails_behind: int | None = None
    """Turns behind which the next one fails; None for none."""
    num_turns: int = 0

    async def prepare(self) -> None:
        """Note it."""
        self.log.append(("prepare", self.name, -1))

    async def counters(self) -> dict[str, float]:
        """Count by tens."""
        self.counted += 10.0
        return {"bytes_moved": self.counted}

    async def warm_up(self) -> WarmUp:
        """Note it, and tell of two short prefills."""
        self.log.append(("warm_up", self.name, -1))
        return WarmUp((2.0, 0.5), ((10, 0.1), (20, 0.2)))

    async def open(self, script: Script) -> MadeAgent:
        """Begin."""
        return MadeAgent(self, script)
