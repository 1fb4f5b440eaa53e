"""One measurement: one arm under one load, from its start to the rest after it.

`measure` runs the sessions here and the others in their own process, and returns a `Cell`: what happened, unjudged.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from bench._pressure_arms import Refused
from bench._pressure_load import BLOCK_SIZE, arrivals, first_prompt, next_prompt, sessions_of
from bidikv_sdk.prefix import num_blocks
from server_ext.launch.tiny import WIDE

if TYPE_CHECKING:
    from collections.abc import Callable

    from bench._others import Other, Others
    from bench._pressure_arms import Answer, Arm, Samples
    from bench._pressure_load import Pace, Session

LEAD_S: Final = 0.3
"""From the order to start to the first request."""
_POLL_S: Final = 1.0


@dataclass(slots=True)
class Asked:
    """One turn of a session, as its client saw it."""

    slot: int
    turn: int
    prompt_ids: list[int] = field(repr=False)
    sent_s: float
    ended_s: float | None = None
    answer: Answer | None = field(default=None, repr=False)
    error: str | None = None


@dataclass(slots=True)
class Peaks:
    """The most that was seen at once, in blocks of D."""

    demanded: int = 0
    """What live sessions would hold."""
    held: int = 0
    """What was held between turns."""
    ticketed: int = 0
    used: float = 0.0
    """Part of the pool that nobody else could have."""


@dataclass(slots=True)
class Cell:
    """One measurement."""

    arm: str
    percent: int
    start_s: float
    end_s: float
    others: list[Other]
    asked: list[Asked]
    peaks: Peaks
    before: Samples
    after: Samples
    blocks_left: int | None
    """In use on either engine when all sessions had ended and everything had come to rest; None: not waited for."""


class Agents:
    """All sessions of a cell, and what they ask."""

    def __init__(self, arm: Arm, slots: int, tag: str, tokenize: Callable[[str], list[int]]) -> None:
        self.asked: list[Asked] = []
        self.peaks = Peaks()
        self._arm = arm
        self._tokenize = tokenize
        self._agents = [_Agent(self, slot, tag) for slot in range(slots)]

    async def run(self, events: list[tuple[float, int]], start_s: float, last_s: float) -> None:
        """Ask at the given times, leave what is not answered at `last_s`, and end all sessions."""
        tasks = []
        for at_s, slot in events:
            await asyncio.sleep(start_s + at_s - time.monotonic())
            tasks.append(asyncio.create_task(self._agents[slot].go_on()))
        _, late = await asyncio.wait(tasks, timeout=max(last_s - time.monotonic(), 0.0))
        for task in late:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for task in tasks:
            if not task.cancelled() and (error := task.exception()) is not None:
                raise error
        for agent in self._agents:
            await agent.end()

    def count(self) -> None:
        """Note what all live sessions would hold now."""
        self.peaks.demanded = max(self.peaks.demanded, sum(agent.num_blocks for agent in self._agents))

    async def ask(self, asked: Asked, conversation: str, messages: list[dict[str, Any]]) -> None:
        """Run one turn."""
        self.asked.append(asked)
        try:
            asked.answer = await self._arm.turn(conversation, asked.turn, {"messages": messages}, asked.prompt_ids)
        except Refused as refused:
            asked.error = str(refused)
        asked.ended_s = time.monotonic()
        if asked.answer is not None:
            self.peaks.ticketed = max(self.peaks.ticketed, asked.answer.ticket_blocks)

    async def close(self, conversation: str) -> None:
        """End a session."""
        await self._arm.end(conversation)

    def prompt(self, session: Session, turn: int, history: list[int]) -> list[int]:
        """Return the prompt of a turn behind what was said before."""
        if turn == 1:
            return first_prompt(session, self._tokenize)
        return next_prompt(history, [], session.delta(turn), self._tokenize)


class _Agent:
    """One slot: its sessions, one after the other."""

    def __init__(self, agents: Agents, slot: int, tag: str) -> None:
        self._agents = agents
        self._slot = slot
        self._tag = tag
        self._sessions = sessions_of(slot)
        self._session = next(self._sessions)
        self._turn = 0
        self._history: list[int] = []
        self._lock = asyncio.Lock()

    @property
    def num_blocks(self) -> int:
        return num_blocks(max(len(self._history) - 1, 0), BLOCK_SIZE)

    @property
    def _conversation(self) -> str:
        return f"{self._tag}-{self._slot}-{self._session.number}"

    async def go_on(self) -> None:
        """Run the next turn, when the one before has ended; the last one ends the session."""
        async with self._lock:
            self._turn += 1
            prompt_ids = self._agents.prompt(self._session, self._turn, self._history)
            asked = Asked(self._slot, self._turn, prompt_ids, time.monotonic())
            messages = [{"role": "user", "content": self._session.delta(self._turn)}]
            if self._turn == 1:
                messages = [{"role": "system", "content": self._session.system}, *messages]
            await self._agents.ask(asked, self._conversation, messages)
            if asked.answer is not None:
                self._history = asked.answer.prompt_ids + asked.answer.token_ids
            self._agents.count()
            if asked.error is not None or self._turn == self._session.num_turns:
                await self.end()
                self._session = next(self._sessions)

    async def end(self) -> None:
        """End the session that there is, if it has begun."""
        if self._turn:
            with suppress(Refused):  # what an error ended already
                await self._agents.close(self._conversation)
        self._turn, self._history = 0, []


async def measure(
    arm: Arm,
    others: Others,
    load: tuple[int, int, Pace],
    tokenize: Callable[[str], list[int]],
    *,
    comes_to_rest: bool = True,
) -> Cell:
    """Measure an arm that is awake and at rest, with its prefix caches empty.

    Args:
        arm: which.
        others: the process of the other requests.
        load: percent of the pool, sessions at a time, and how fast requests come.
        tokenize: of the model.
        comes_to_rest: wait until it is at rest again.
    """
    percent, slots, pace = load
    before = await arm.pair.samples()
    start_s = time.monotonic() + LEAD_S
    end_s = start_s + pace.duration_s
    last_s = end_s + pace.grace_s
    asking = others.start(arm.pair.stack.url, WIDE.name, start_s, end_s, last_s)
    agents = Agents(arm, slots, f"{arm.name}-{percent}-{start_s:.0f}", tokenize)
    watching = asyncio.create_task(_watch(arm, agents.peaks))
    await agents.run(arrivals(slots, pace), start_s, last_s)
    asked_by_others = await asyncio.wrap_future(asking)
    watching.cancel()
    (ended,) = await asyncio.gather(watching, return_exceptions=True)
    # A scrape may fail under such a load; but one that lacks a metric would leave a peak of 0, which says something.
    if isinstance(ended, LookupError):
        raise ended
    blocks_left = await arm.pair.rest() if comes_to_rest else None
    after = await arm.pair.samples()
    return Cell(
        arm.name, percent, start_s, end_s, asked_by_others, agents.asked, agents.peaks, before, after, blocks_left
    )


async def _watch(arm: Arm, peaks: Peaks) -> None:
    while True:
        samples = await arm.pair.samples()
        peaks.held = max(peaks.held, arm.num_held_blocks(samples))
        peaks.ticketed = max(peaks.ticketed, arm.num_ticketed_blocks(samples))
        peaks.used = max(peaks.used, samples.get("vllm:kv_cache_usage_perc"))
        await asyncio.sleep(_POLL_S)
