"""Grids of scenarios, and what is concluded from their answers."""

import json
from dataclasses import replace

import pytest

from server_ext.core.settings import HomeSettings
from server_ext.simulation.run import run
from server_ext.simulation.scenario import Cell, Scenario, grid, parse_axes, recommend, settings_of
from server_ext.traffic import SMALL

from .fleets import RATES, session, turn

BASE = Scenario(limits=None, rates=RATES, workload=SMALL, sessions=10, concurrent=5, ttl=5, chunk=50)


def cell(p99_s, **values):
    """Return an answer with this 99th percentile."""
    found = replace(_FOUND, later_ttft_s={"p50": p99_s / 2, "p95": p99_s, "p99": p99_s})
    return Cell(values, replace(BASE, **values), found)


_FOUND = run(BASE)


def test_axes_are_read_with_their_kinds():
    """Counts, shares, words and flags."""
    axes = parse_axes(["decode=1,2", "budget=0.25, 0.5", "route=fetch,prefill", "hold=yes,no", "prefill-cache=no"])
    assert axes == {
        "decode": [1, 2],
        "budget": [0.25, 0.5],
        "route": ["fetch", "prefill"],
        "hold": [True, False],
        "prefill_cache": [False],
    }


@pytest.mark.parametrize("text", ["decode", "decode=", "speed=1", "decode=1.5", "ttl=long", "hold=maybe"])
def test_an_axis_that_makes_no_sense_is_refused(text):
    """The error quotes it."""
    with pytest.raises(ValueError, match="--sweep"):
        parse_axes([text])


def test_a_grid_has_every_combination():
    """Two by three are six, the last axis the fastest."""
    cells = grid(BASE, {"decode": [1, 2], "ttl": [1.0, 2.0, 3.0]})
    assert [(s.decode, s.ttl) for _, s in cells] == [(d, t) for d in (1, 2) for t in (1.0, 2.0, 3.0)]


@pytest.mark.parametrize(
    ("axes", "named"),
    [
        ({"budget": [1.5]}, "budget_fraction"),
        ({"ttl": [-1.0]}, "default_ttl_s"),
        ({"route": ["sideways"]}, "route is 'sideways'"),
        ({"concurrent": [0.0]}, "above 0"),
        ({"decode": [0]}, "num_decode"),
        ({"link": ["400g"]}, "measured rates"),
    ],
)
def test_a_combination_that_makes_no_sense_is_refused_before_anything_runs(axes, named):
    """The error names the setting."""
    with pytest.raises(ValueError, match=named):
        grid(BASE, axes)


def test_as_many_sessions_are_in_progress_as_asked_for():
    """The rate of arrivals is such that, by their lives, about so many overlap."""
    assert BASE.rate_per_s() == pytest.approx(5 / BASE.mean_life_s())


def test_recorded_sessions_are_drawn_at_random_or_played_as_they_were():
    """With a number at a time sessions are drawn and begin at random; without, each begins when it did."""
    recorded = (session(turn(100), start=0), session(turn(200), start=7))
    drawn = list(replace(BASE, workload=recorded, sessions=50).load())
    assert len(drawn) == 50
    assert {one.turns for one in drawn} == {one.turns for one in recorded}
    assert list(replace(BASE, workload=recorded, concurrent=None).load()) == list(recorded)


def test_the_fewest_engines_that_meet_the_target_are_recommended():
    """Of three fleets two meet it; the smaller one wins, though the larger one is faster."""
    cells = [cell(9.0, decode=1), cell(1.5, decode=2), cell(1.0, decode=4)]
    advice = recommend(cells, 2.0)
    assert advice.best is cells[1]
    assert settings_of(advice.best.scenario) == {
        "budget_fraction": 0.5,
        "default_ttl_s": 5,
        "default_route": "fetch",
    }
    assert recommend(cells, 0.5).best is None


@pytest.mark.parametrize("ttl_s", [5.0, 1_200.0, 7_200.0])
def test_recommended_settings_are_the_servers(ttl_s):
    """The server takes them as they stand, whatever grid was asked for, and they are what was simulated."""
    scenario = replace(BASE, ttl=ttl_s, route="auto")
    assert HomeSettings.from_config(settings_of(scenario)) == replace(scenario.config().settings, default_route="auto")


def test_without_a_target_nearly_the_best_will_do():
    """A lease of 60 s is within 10 % of one of 480 s, so the shorter one is recommended."""
    cells = [cell(5.0, ttl=15.0), cell(1.05, ttl=60.0), cell(1.0, ttl=480.0)]
    assert recommend(cells, None).best is cells[1]


def test_where_a_fleet_stops_to_scale():
    """Of three loads the third is beyond the target, and what is busiest there is named."""
    cells = [cell(t, concurrent=float(n)) for n, t in ((10, 1.0), (20, 1.2), (40, 9.0))]
    (line,) = recommend(cells, 2.0).scaling
    assert line.startswith("1P + 1D: carries 20 sessions; beyond, ")
    assert "busiest" in line
    (line,) = recommend(cells[:2], 2.0).scaling
    assert line.endswith("carries 20 sessions at a time and more")


def test_a_fleet_is_judged_by_the_heaviest_load():
    """What a small fleet does under the light load does not recommend it."""
    cells = [
        cell(1.0, decode=1, concurrent=5.0),
        cell(9.0, decode=1, concurrent=50.0),
        cell(1.0, decode=2, concurrent=5.0),
        cell(1.1, decode=2, concurrent=50.0),
    ]
    assert recommend(cells, 2.0).best is cells[3]


def test_a_fleet_that_cannot_serve_everything_is_never_recommended():
    """Turns that no engine could take weigh more than a good percentile of the others."""
    one = cell(1.0, decode=1)
    refusing = Cell(one.values, one.scenario, replace(one.results, refused={"no_room": 1}))
    assert recommend([refusing], 2.0).best is None


def test_a_fleet_that_refuses_turns_at_every_load_does_not_scale():
    """Without a target nothing is left to hold loads against: none is carried, and what was refused is told."""
    cells = [cell(1.0, concurrent=float(n)) for n in (10, 100)]
    cells = [replace(one, results=replace(one.results, refused={"over_context": 3})) for one in cells]
    advice = recommend(cells, None)
    (line,) = advice.scaling
    assert line == "1P + 1D: carries less than the least load; beyond, turns could not be served (3 over context)"
    assert json.loads(json.dumps(advice.to_json(), allow_nan=False))["target_p99_s"] is None


def test_nothing_is_said_of_how_single_turns_scale():
    """Sessions of one turn have no later ones that a load could be judged by."""
    cells = [cell(1.0, concurrent=float(n)) for n in (10, 100)]
    cells = [replace(one, results=replace(one.results, later_ttft_s=None)) for one in cells]
    advice = recommend(cells, None)
    assert advice.best is None
    assert advice.scaling == ["1P + 1D: no later turn was judged, so nothing can be said"]
