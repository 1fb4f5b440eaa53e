"""Runs scenarios over the arms that there are, and gathers the file's content.

`run_suite` is all that the command and the scripts call: it warms the engines up, runs every scenario's rounds, and
returns the results with the rates that the same run showed.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from server_ext.benchmark.arms import GREEDY, SessionArm
from server_ext.benchmark.limits import MeasuredRates
from server_ext.benchmark.rounds import Reference, run_rounds
from server_ext.benchmark.summary import ScenarioResult

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from bidikv_sdk import AsyncBidiKV
    from server_ext.benchmark.arms import Arm, Complete
    from server_ext.benchmark.rounds import ArmRound
    from server_ext.benchmark.scenarios import Scenario

REFERENCE_ARM = "no_reuse"
_SHORT_PREFILLS = 5


@dataclass(frozen=True)
class Model:
    """What the arithmetic of limits needs to know of the model: see `limits`."""

    name: str
    attention_tokens: float
    kv_bytes_per_token: int


@dataclass
class SuiteResult:
    """All scenarios of one run, by name."""

    scenarios: dict[str, ScenarioResult] = field(default_factory=dict)
    rates: MeasuredRates | None = None
    """None where nothing was fetched."""
    seconds: float = 0.0

    def to_json(self, *, machine: Mapping[str, Any], versions: Mapping[str, Any]) -> dict[str, Any]:
        """Return the content of `bench.json`."""
        return {
            "machine": dict(machine),
            "versions": dict(versions),
            "seconds": self.seconds,
            "rates": None if self.rates is None else self.rates.to_json(),
            "scenarios": {name: one.to_json(self.rates) for name, one in self.scenarios.items()},
        }


async def run_suite(
    scenarios: Sequence[Scenario],
    make_arms: Callable[[Scenario, Reference], Mapping[str, Arm]],
    *,
    model: Model,
    num_rounds: int,
    seed: int,
    beside: Mapping[str, Complete],
    on_part: Callable[[Scenario, ArmRound], None],
    max_seconds: float | None = None,
) -> SuiteResult:
    """Run every scenario.

    Args:
        scenarios: in this order.
        make_arms: the arms of a scenario by name, given what its reference arm records; the first is `no_reuse`.
        model: of the engines.
        num_rounds: of each scenario.
        seed: of conversations and orders.
        beside: by arm, see `run_rounds`.
        on_part: called after each arm's part of each round.
        max_seconds: no scenario begins another round once so much time is over, shared out evenly; None for no limit.
    """
    result = SuiteResult()
    started_s = time.perf_counter()
    short_prefills: list[tuple[int, float]] = []
    for number, scenario in enumerate(scenarios, start=1):
        reference = Reference()
        arms = make_arms(scenario, reference)
        for arm in arms.values():
            short_prefills += await warm_up(arm)
        found = result.scenarios[scenario.name] = ScenarioResult(scenario, reference)
        deadline_s = None if max_seconds is None else started_s + max_seconds * number / len(scenarios)

        def is_over(deadline_s: float | None = deadline_s) -> bool:
            return deadline_s is not None and time.perf_counter() > deadline_s

        async for part in run_rounds(
            scenario, arms, reference=reference, num_rounds=num_rounds, seed=seed, beside=beside, is_over=is_over
        ):
            found.add(part)
            on_part(scenario, part)
    result.seconds = time.perf_counter() - started_s
    samples = [sample for one in result.scenarios.values() for sample in one.samples]
    if any(sample.fetched_tokens for sample in samples):
        result.rates = MeasuredRates.fit(
            samples,
            short_prefills=short_prefills,
            attention_tokens=model.attention_tokens,
            kv_bytes_per_token=model.kv_bytes_per_token,
        )
    return result


async def warm_up(arm: Arm) -> list[tuple[int, float]]:
    """Have an arm's engines read from each other once, and return tokens and seconds of some short prefills.

    The first transfer of a pair connects them, and the first requests of an engine fill its own caches: that happens
    once in the life of an engine, and belongs into no figure.
    """
    await arm.prepare()
    if not isinstance(arm, SessionArm):
        return []
    async with arm.client.session(system="Answer briefly. " * 60, route="fetch", **GREEDY) as session:
        for text in ("Hello!", "And again."):
            await session.send(text, max_completion_tokens=4)
    return await _short_prefills(arm.client) if arm.name == REFERENCE_ARM else []


async def _short_prefills(client: AsyncBidiKV) -> list[tuple[int, float]]:
    points = []
    for _ in range(_SHORT_PREFILLS):
        async with client.session(route="recompute", **GREEDY) as session:
            cache = (await session.send("Hello!", max_completion_tokens=2)).cache
            points.append((cache.prompt_tokens, cache.timings_s.prefill or 0.0))
    return points
