"""A scenario from the warm-up to its figures."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from server_ext.benchmark.scenarios import Scenario, growing
from server_ext.benchmark.suite import Model, run_scenario, to_file
from tests.benchmark.made import MadeArm

SCENARIO = Scenario(
    name="made",
    what="Made up.",
    plan=growing([20], num_turns=3, delta_tokens=(4, 8), output_tokens=1),
    arms=("no_reuse", "fetch", "aggregated"),
)


def run(log, *, scenario=SCENARIO, fails_behind=None, **options):
    """Run a scenario in which two arms share their engines; the last one may fail behind so many turns."""
    pair, one = object(), object()
    arms = {
        "no_reuse": MadeArm("no_reuse", log, engines=pair),
        "fetch": MadeArm("fetch", log, engines=pair),
        "aggregated": MadeArm("aggregated", log, engines=one, tells=False, fails_behind=fails_behind),
    }
    return asyncio.run(
        run_scenario(
            scenario,
            lambda _: arms,
            model=Model("m", 4000.0, 1000),
            num_rounds=2,
            seed=1,
            on_part=lambda _: None,
            **options,
        )
    )


def test_engines_are_warmed_up_once_however_many_arms_they_serve():
    """Half a minute of warm-up in every arm would be the largest part of a short run."""
    log = []
    found = run(log)
    assert [name for what, name, _ in log if what == "warm_up"] == ["no_reuse", "aggregated"]
    assert found.to_json()["warm_up_ttft_s"] == {"no_reuse": [2.0, 0.5], "aggregated": [2.0, 0.5]}


def test_the_file_says_what_was_run():
    """Every arm with its turns, the model, and how long it took."""
    found = run([])
    content = to_file([found], machine={"cores": 2}, versions={"vllm": "0.32"})
    made = content["scenarios"]["made"]
    assert (content["machine"], made["model"]) == ({"cores": 2}, "m")
    assert {arm: one["turns"] for arm, one in made["arms"].items()} == {"no_reuse": 6, "fetch": 6, "aggregated": 6}
    assert made["seconds"] >= 0
    assert made["rates"] is not None


def test_a_run_whose_time_is_over_ends_after_whole_rounds():
    """The first round is always run."""
    log = []
    run(log, max_seconds=0.0)
    assert len([what for what, *_ in log if what == "turn"]) == 9


def test_whole_rounds_outlive_what_ends_a_later_one():
    """An engine that dies in the second of two rounds costs that round, and the file says so."""
    found = run([], fails_behind=4).to_json()
    assert {name: arm["rounds"] for name, arm in found["arms"].items()} == {
        "no_reuse": 1,
        "fetch": 1,
        "aggregated": 1,
    }
    assert "gone" in found["ended_early"]
    assert run([]).to_json()["ended_early"] is None


def test_what_ends_the_first_round_is_an_error():
    """There is nothing to keep, and what went wrong is said, not in how many tasks."""
    with pytest.raises(ConnectionError, match="gone"):
        run([], fails_behind=1)


def test_turns_too_few_for_rates_are_kept(monkeypatch):
    """Where nothing tells what a token costs, there is no floor, and the rest stands."""

    def fit(*args, **options):
        msg = "no turn computed its whole prompt"
        raise ValueError(msg)

    monkeypatch.setattr("server_ext.benchmark.suite.MeasuredRates.fit", fit)
    found = run([])
    assert (found.rates, found.ended_early) == (None, None)
    assert found.to_json()["arms"]["fetch"]["turns"] == 6


def test_agents_side_by_side_tell_no_rates():
    """What a turn takes then holds its waiting for others."""
    assert run([], scenario=replace(SCENARIO, at_once=2)).rates is None
