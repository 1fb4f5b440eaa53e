"""Runs a scenario: in each round every arm serves the same conversations, one arm after the other, in a drawn order.

`run_rounds` yields what each arm said in each round, as it comes. The reference arm goes first in the first round:
the others replay its token ids, and are compared with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from server_ext.benchmark.samples import Sample
from server_ext.benchmark.scenarios import Continuation, find_continuation

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Mapping, Sequence

    from server_ext.benchmark.arms import Agent, Arm, Complete, Said
    from server_ext.benchmark.scenarios import Ask, Scenario, Script

_BESIDE_TOKENS: Final = 256
"""Of each answer that is generated beside the agents."""


@dataclass(frozen=True, slots=True)
class Company:
    """What else the engines of the arms are asked, by arm.

    * **beside** - completions on the engine that decodes for it, for the requests beside the agents.
    * **crowd** - completions on the engine that prefills for it, for other sessions' prompts between the turns.
    """

    beside: Mapping[str, Complete] = field(default_factory=dict)
    crowd: Mapping[str, Complete] = field(default_factory=dict)


@dataclass(slots=True)
class ArmRound:
    """What one arm did in one round."""

    arm: str
    round: int
    samples: list[Sample] = field(default_factory=list)
    beside_gaps_s: list[float] = field(default_factory=list)
    """Seconds between tokens of the requests beside the agents, while agents were asking."""
    seconds: float = 0.0
    """From the first request to the last answer; without the ends of conversations where agents run one by one."""
    counters: dict[str, float] = field(default_factory=dict)
    """What the engines counted meanwhile: see `Arm.counters`."""
    errors: list[str] = field(default_factory=list)


@dataclass
class Reference:
    """What the reference arm was asked and said, by round and script."""

    prompts: dict[tuple[int, int], list[tuple[int, ...]]] = field(default_factory=dict)
    answers: dict[tuple[int, int], list[tuple[int, ...]]] = field(default_factory=dict)
    continuations: dict[int, list[Continuation]] = field(default_factory=dict)
    """[turns] by script, of the round that runs."""

    def continuation(self, script: int, turn: int) -> Continuation:
        """Return how a turn of the round that runs continues the one before it."""
        return self.continuations[script][turn - 1]

    def record(self, part: ArmRound, scripts: Sequence[Script]) -> None:
        """Take a round of the reference arm.

        Raises:
            ValueError: a turn's prompt does not begin with the one before it.
        """
        self.continuations.clear()
        for sample in sorted(part.samples, key=lambda one: (one.session, one.turn)):
            key = (part.round, sample.session)
            self.prompts.setdefault(key, []).append(sample.prompt_ids)
            self.answers.setdefault(key, []).append(sample.token_ids)
        for script in scripts:
            turns: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
            key = (part.round, script.number)
            for ask, prompt, answer in zip(script.asks, self.prompts[key], self.answers[key], strict=True):
                if ask.rewind_to is not None:
                    del turns[ask.rewind_to :]
                before = turns[-1] if turns else ((), ())
                self.continuations.setdefault(script.number, []).append(find_continuation(prompt, *before))
                turns.append((prompt, answer))

    def differs(self, sample: Sample) -> bool:
        """Tell whether a turn's tokens are not those of the reference; also where the reference has no such turn."""
        key = (sample.round, sample.session)
        prompts, answers = self.prompts.get(key, []), self.answers.get(key, [])
        at = sample.turn - 1
        return at >= len(prompts) or (prompts[at], answers[at]) != (sample.prompt_ids, sample.token_ids)


async def run_rounds(
    scenario: Scenario,
    arms: Mapping[str, Arm],
    *,
    reference: Reference,
    num_rounds: int,
    seed: int,
    company: Company,
    is_over: Callable[[], bool] = lambda: False,
) -> AsyncIterator[ArmRound]:
    """Run a scenario and yield each arm's part of each round when it is complete.

    Args:
        scenario: the conversations.
        arms: those of the scenario, by name; the first one is the reference.
        reference: filled here.
        num_rounds: how often each arm runs.
        seed: of the conversations and of the arms' order.
        company: who serves what the scenario asks besides.
        is_over: asked before each round from the second on; ends early, after whole rounds.
    """
    names = list(arms)
    for round_number in range(num_rounds):
        scripts = scenario.scripts(round_number, seed=seed)
        # The reference first: the stock arms need its token ids.
        draw = random.Random(f"{seed}/{round_number}")  # noqa: S311 (an order)
        order = [names[0], *draw.sample(names[1:], len(names) - 1)]
        if round_number and is_over():
            return
        for name in order:
            part = await _ArmRun(scenario, arms[name], round_number, company).run(scripts)
            if name == names[0]:
                reference.record(part, scripts)
            yield part


class _ArmRun:
    """One arm's part of one round."""

    def __init__(self, scenario: Scenario, arm: Arm, round_number: int, company: Company) -> None:
        self._scenario = scenario
        self._arm = arm
        self._beside = company.beside.get(arm.name)
        self._crowd = company.crowd.get(arm.name)
        self._slots = contextlib.nullcontext() if scenario.at_once is None else asyncio.Semaphore(scenario.at_once)
        self._part = ArmRound(arm.name, round_number)
        self._num_asking = 0
        self._closing_s = 0.0

    async def run(self, scripts: Sequence[Script]) -> ArmRound:
        await self._arm.prepare()
        before = await self._arm.counters()
        started_s = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for script in scripts:
                group.create_task(self._run(script))
        self._part.seconds = time.perf_counter() - started_s - self._closing_s
        after = await self._arm.counters()
        self._part.counters = {name: after[name] - before.get(name, 0.0) for name in after}
        return self._part

    async def _run(self, script: Script) -> None:
        if self._scenario.at_once is None:
            await asyncio.sleep(script.start_s)
        async with self._slots, contextlib.AsyncExitStack() as stack:
            agent = await self._arm.open(script)
            stack.push_async_callback(self._close, agent)
            beside = await stack.enter_async_context(contextlib.AsyncExitStack())
            is_beside = False
            for turn, ask in enumerate(script.asks, start=1):
                if is_beside != (turn in self._scenario.turns_beside):
                    is_beside = not is_beside
                    await beside.aclose()
                    if is_beside and self._beside is not None:
                        await beside.enter_async_context(self._others())
                if turn > 1 and ask.gap_s:
                    await asyncio.sleep(ask.gap_s)
                await self._compute_crowd(ask)
                self._num_asking += 1
                said = await agent.run(ask)
                self._num_asking -= 1
                self._part.samples.append(self._sample(script.number, turn, said, ask, beside=is_beside))

    async def _close(self, agent: Agent) -> None:
        """End a conversation. A benchmark may do more then than an agent would, so the arm's time stands still."""
        started_s = time.perf_counter()
        await agent.close()
        if self._scenario.at_once == 1:
            self._closing_s += time.perf_counter() - started_s

    async def _compute_crowd(self, ask: Ask) -> None:
        """Have the prompts of other sessions computed, one after the other, as they come while this agent's tool runs.

        One token of each is asked for: what follows is another decode engine's business.
        """
        if not ask.crowd:
            return
        if self._crowd is None:
            msg = f"{self._arm.name} has no engine for the prompts of other sessions"
            raise ValueError(msg)
        for prompt in ask.crowd:
            async for _chunk in self._crowd(prompt, 1, {}):
                pass

    @contextlib.asynccontextmanager
    async def _others(self) -> AsyncIterator[None]:
        """Keep requests decoding on the same engine for the length of the block."""
        decoding = [asyncio.Event() for _ in range(self._scenario.num_beside)]
        tasks = [asyncio.create_task(self._decode(number, begun)) for number, begun in enumerate(decoding)]
        try:
            # They begin with a prefill of their own, which belongs to nobody's turn.
            for begun, task in zip(decoding, tasks, strict=True):
                waiting = asyncio.ensure_future(begun.wait())
                await asyncio.wait([waiting, task], return_when=asyncio.FIRST_COMPLETED)
                waiting.cancel()
            yield
        finally:
            for task in tasks:
                task.cancel()
            results = await asyncio.gather(*tasks, return_exceptions=True)
            self._part.errors += [repr(one) for one in results if isinstance(one, Exception)]

    async def _decode(self, number: int, begun: asyncio.Event) -> None:
        assert self._beside is not None  # noqa: S101 (asked for by `_run` only then)
        prompt = list(range(100 + number, 132 + number))
        while True:
            last_s: float | None = None
            async with contextlib.aclosing(_generator(self._beside(prompt, _BESIDE_TOKENS, {}))) as chunks:
                async for chunk in chunks:
                    if any(choice.get("token_ids") for choice in chunk["choices"]):
                        now_s = time.perf_counter()
                        begun.set()
                        if last_s is not None and self._num_asking:
                            self._part.beside_gaps_s.append(now_s - last_s)
                        last_s = now_s

    def _sample(self, script: int, turn: int, said: Said, ask: Ask, *, beside: bool) -> Sample:
        cache = said.cache
        known: dict[str, Any] = {"reused_tokens": said.num_cached_tokens}
        if cache is not None:
            timings = cache.timings_s
            parts = (timings.render, timings.begin, timings.settle)
            known = {
                "held_tokens": cache.held_tokens,
                "reused_tokens": cache.reused_tokens,
                "fetched_tokens": cache.fetched_tokens,
                "outcome": cache.outcome,
                "prefill_s": timings.prefill,
                "fetch_s": timings.fetch,
                "handover_s": timings.handover,
                "overhead_s": sum(part or 0.0 for part in parts),
            }
        return Sample(
            arm=self._arm.name,
            round=self._part.round,
            session=script,
            turn=turn,
            beside=beside,
            is_measured=ask.is_measured,
            ttft_s=said.ttft_s,
            gaps_s=tuple(said.gaps_s),
            prompt_tokens=len(said.prompt_ids),
            computed_tokens=len(said.prompt_ids) - known["reused_tokens"] - known.get("fetched_tokens", 0),
            prompt_ids=tuple(said.prompt_ids),
            token_ids=tuple(said.token_ids),
            **known,
        )


async def _generator(chunks: AsyncIterator[dict[str, Any]]) -> Any:
    """Make any async iterator one that can be closed."""
    async for chunk in chunks:
        yield chunk
