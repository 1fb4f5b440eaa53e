"""Runs one scenario over the arms that there are, and makes the file of several.

`run_scenario` is all that the command and the scripts call: it warms the engines up, runs the rounds, and returns what
the arms showed, with the rates of the same run.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from server_ext.benchmark.limits import MeasuredRates
from server_ext.benchmark.rounds import Company, Reference, run_rounds
from server_ext.benchmark.summary import ScenarioResult

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from server_ext.benchmark.arms import Arm, Engines
    from server_ext.benchmark.rounds import ArmRound
    from server_ext.benchmark.scenarios import Scenario


logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Model:
    """What the arithmetic of limits needs to know of the model: see `limits`."""

    name: str
    attention_tokens: float
    kv_bytes_per_token: int


async def run_scenario(
    scenario: Scenario,
    make_arms: Callable[[Reference], Mapping[str, Arm]],
    *,
    model: Model,
    num_rounds: int,
    seed: int,
    on_part: Callable[[ArmRound], None],
    company: Company | None = None,
    max_seconds: float | None = None,
) -> ScenarioResult:
    """Run a scenario.

    Args:
        scenario: the conversations.
        make_arms: its arms by name, given what the reference arm records; that one is the first.
        model: of the engines.
        num_rounds: how often each arm runs.
        seed: of conversations and orders.
        on_part: called after each arm's part of each round.
        company: see `run_rounds`; None where the scenario asks nothing besides.
        max_seconds: no other round begins once so much time is over; None for no limit.

    Returns:
        What whole rounds showed. Where something fails behind the first round, `ended_early` says what.
    """
    reference = Reference()
    arms = make_arms(reference)
    started_s = time.perf_counter()
    found = ScenarioResult(scenario, reference, model=model.name)
    short_prefills: list[tuple[int, float]] = []
    warm: list[Engines] = []
    for arm in arms.values():
        if all(arm.engines is not one for one in warm):  # arms that share engines need them warm once
            await arm.prepare()
            warm_up = await arm.warm_up()
            short_prefills += warm_up.short_prefills
            found.first_s[arm.name] = warm_up.first_s
            warm.append(arm.engines)

    def is_over() -> bool:
        return max_seconds is not None and time.perf_counter() - started_s > max_seconds

    round_parts: list[ArmRound] = []
    try:
        async for part in run_rounds(
            scenario,
            arms,
            reference=reference,
            num_rounds=num_rounds,
            seed=seed,
            company=company or Company(),
            is_over=is_over,
        ):
            on_part(part)
            round_parts.append(part)
            if len(round_parts) == len(arms):
                for one in round_parts:
                    found.add(one)
                round_parts.clear()
    except Exception as error:
        cause = _cause(error)
        if not found.arms:
            raise cause from None
        # Whole rounds are worth hours; whoever judges the file sees that there should be more.
        logger.exception("%s ended early", scenario.name)
        found.ended_early = repr(cause)
    # Where agents run side by side, what a turn took holds its waiting, and is no rate.
    if scenario.at_once == 1 and any(sample.fetched_tokens for sample in found.samples):
        try:
            found.rates = MeasuredRates.fit(
                found.samples,
                short_prefills=short_prefills,
                attention_tokens=model.attention_tokens,
                kv_bytes_per_token=model.kv_bytes_per_token,
            )
        except ValueError as error:  # too few turns for rates are still turns
            logger.warning("%s has no rates, and no floor: %s", scenario.name, error)
    found.seconds = time.perf_counter() - started_s
    return found


def _cause(error: Exception) -> Exception:
    """Return what went wrong first, out of the groups in which tasks side by side end."""
    while causes := getattr(error, "exceptions", ()):  # of an `ExceptionGroup`, whose name Python 3.10 lacks
        error = causes[0]
    return error


def to_file(
    results: Iterable[ScenarioResult], *, machine: Mapping[str, Any], versions: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the content of `bench.json`."""
    return {
        "machine": dict(machine),
        "versions": dict(versions),
        "scenarios": {one.scenario.name: one.to_json() for one in results},
    }
