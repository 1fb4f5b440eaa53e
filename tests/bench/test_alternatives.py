"""What the benchmark's script makes of its plan, without engines."""

import json
import sys
from types import SimpleNamespace

import pytest

from bench import alternatives
from bench._plan import ARMS, FULL_RUN, LONG_AGENT, PRESSED
from bench._setups import HOLD_S, set_of
from bench._stock import Handles, StockProxy
from server_ext.benchmark.rounds import Reference
from server_ext.benchmark.suite import Model


@pytest.fixture
def bench():
    """Arms on engines that are not there."""
    urls = {set_of(arm): (f"http://{set_of(arm)}/p", f"http://{set_of(arm)}/d") for arm in ARMS}
    sets = SimpleNamespace(sets={name: SimpleNamespace(urls=one) for name, one in urls.items()}, run=lambda name: None)
    stock = {name: StockProxy(None, None, "m", Handles(60, block_size=32)) for name in HOLD_S}
    return alternatives.Bench(sets, None, None, Model("m", 1.0, 1000), stock)


def test_every_arm_of_the_plan_is_made(bench):
    """Those of our pair share its engines, so that it is warmed up once; a stock pair's caches are left alone."""
    arms = bench.arms(LONG_AGENT, Reference())
    assert tuple(arms) == ARMS
    assert len({id(arm.engines) for name, arm in arms.items() if set_of(name) == "ours"}) == 1
    assert [arms[name].engines.engines.can_reset for name in HOLD_S] == [False, False]
    assert arms["aggregated"].engines.can_reset


def test_ps_cache_is_emptied_only_where_nobody_else_fills_it(bench):
    """Under pressure every arm has what the other sessions leave it."""
    for scenario, is_emptied in ((LONG_AGENT, True), (PRESSED, False)):
        arms = bench.arms(scenario, Reference())
        assert (arms["fetch"].empty_prefill_cache is not None) is is_emptied
        assert arms["prefill_cache"].empty_prefill_cache is None
        assert arms["auto"].empty_prefill_cache is None
        for name in HOLD_S:
            assert arms[name].complete.__self__.is_prefill_cache_missing is is_emptied


CONTENT = {"machine": {"cores": 2}, "versions": {"vllm": "0.32"}, "run": "full"}


def test_a_result_is_merged_into_one_of_the_same_machine(tmp_path):
    """Its other scenarios stay; without a file there are none."""
    path = tmp_path / "bench.json"
    assert alternatives._scenarios_of(path, CONTENT) == {}  # noqa: SLF001 (what --merge does)
    path.write_text(json.dumps({**CONTENT, "scenarios": {"slow_link": {}}}))
    assert alternatives._scenarios_of(path, CONTENT) == {"slow_link": {}}  # noqa: SLF001 (as above)


def test_a_result_of_another_machine_is_not_merged(tmp_path):
    """Numbers of two machines beside each other compare nothing; the error says what differs."""
    path = tmp_path / "bench.json"
    path.write_text(json.dumps({**CONTENT, "machine": {"cores": 64}, "scenarios": {}}))
    with pytest.raises(alternatives.OtherMachine, match=r"machine \{'cores': 64\}"):
        alternatives._scenarios_of(path, CONTENT)  # noqa: SLF001 (as above)


@pytest.mark.parametrize("run", ["full", None])
def test_a_short_run_is_not_merged_into_a_full_one(tmp_path, run):
    """Its long agent has fewer tokens, and the same name; nor into a file that does not say what it is of."""
    path = tmp_path / "bench.json"
    content = {**CONTENT, "run": run, "scenarios": {}}
    path.write_text(json.dumps({name: value for name, value in content.items() if value is not None}))
    with pytest.raises(alternatives.OtherMachine, match=f"run {run}"):
        alternatives._scenarios_of(path, {**CONTENT, "run": "short"})  # noqa: SLF001 (as above)


@pytest.fixture
def run_main(monkeypatch, tmp_path):
    """Runs the script with engines that are made up; returns its exit status."""

    def run(measure, *arguments):
        monkeypatch.setattr(alternatives, "measure_all", measure)
        monkeypatch.setattr(alternatives, "write", lambda *_: None)
        monkeypatch.setattr(alternatives.signal, "signal", lambda *_: None)
        monkeypatch.setattr(sys, "argv", ["alternatives.py", "--out", str(tmp_path), *arguments])
        return alternatives.main()

    return run


def test_engines_that_do_not_start_cost_their_own_scenarios_only(run_main, capsys):
    """The others are measured, and what is missing is a miss."""
    measured = []

    def measure(setup, parts, content, out, seed):
        if setup.name == "real_slow":
            msg = "no memory left"
            raise RuntimeError(msg)
        for part in parts:
            measured.append(part.scenario.name)
            content["scenarios"][part.scenario.name] = {"arms": {}, "ended_early": None}

    assert run_main(measure, "--full") == 1
    assert set(measured) == {one.scenario.name for one in FULL_RUN} - {"slow_link"}
    said = capsys.readouterr().out
    assert "no memory left" in said
    assert "FAIL  slow_link: measured" in said


def test_a_scenario_of_the_full_run_alone_needs_the_full_run(run_main, capsys):
    """Nothing measured and nothing missed would look like a success."""
    with pytest.raises(SystemExit):
        run_main(lambda *_: None, "--scenario", "slow_link")
    assert "give --full" in capsys.readouterr().err
