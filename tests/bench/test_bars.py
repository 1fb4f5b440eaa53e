"""The bars of the benchmark, on made-up results."""

import pytest

from bench._bars import checks


def estimate(value):
    """A number that is known well."""
    return {"value": value, "low": value * 0.99, "high": value * 1.01}


def figures(p50_s, **changed):
    """An arm's figures."""
    return {
        "tokens_wrong": 0,
        "errors": [],
        "outcomes": {"fetched": 1.0},
        "ttft_s": {"count": 100, "p50": estimate(p50_s), "p95": estimate(2 * p50_s)},
        "itl_beside_s": {"count": 100, "p95": estimate(0.02)},
        "speedup": estimate(1.0 / p50_s),
        "session_overhead_p50_s": 0.006,
        "session_overhead_beside_p50_s": 0.02,
        "points": {},
    } | changed


def result(**arms):
    """A file with one scenario in which all is well, but for what is changed."""
    point = {
        "turns": 100,
        "speedup": estimate(10.0),
        "speedup_p99": estimate(9.0),
        "ceiling_p50": 12.0,
        "ceiling_p99": 12.5,
        "floor_ratio_p50": 1.2,
    }
    good = {
        "no_reuse": figures(1.0),
        "local": figures(0.11),
        "fetch": figures(0.1, points={"2000": point}),
        "auto": figures(0.102),
    }
    return {"scenarios": {"long_agent": {"arms": good | arms, "ended_early": None}}}


def missed(content):
    """The names of the bars that are missed."""
    return [check.name for check in checks(content) if not check.passed]


def test_a_good_run_misses_nothing():
    """Every bar of the good run is judged and met."""
    names = [check.name for check in checks(result(), ["long_agent"])]
    assert len(names) == 14
    assert missed(result()) == []


def point(**changed):
    """Figures of `fetch`, changed at its only point or elsewhere."""
    good = result()["scenarios"]["long_agent"]["arms"]["fetch"]["points"]["2000"]
    inside = {name: value for name, value in changed.items() if name in good}
    return figures(0.1, points={"2000": good | inside}, **{n: v for n, v in changed.items() if n not in good})


@pytest.mark.parametrize(
    ("arms", "bar"),
    [
        ({"local": figures(0.11, tokens_wrong=1)}, "no wrong token"),
        ({"local": figures(0.11, errors=["ReadError()"])}, "nothing failed"),
        ({"fetch": point(outcomes={"fetched": 0.99, "recomputed": 0.01})}, "every later turn of fetch fetched"),
        ({"aggregated": figures(0.09, ttft_s={"count": 100, "p50": estimate(0.09)})}, "best of all, TTFT p50"),
        ({"auto": figures(0.102, speedup=estimate(0.975))}, "not worse than no_reuse"),
        ({"fetch": point(speedup=estimate(7.9), ceiling_p50=8.0)}, "at least 8x at 2000"),
        ({"fetch": point(ceiling_p50=14.5, speedup_p99=estimate(11.0))}, "70% of the limit at 2000 tokens, p50"),
        ({"fetch": point(speedup_p99=estimate(8.7))}, "70% of the limit at 2000 tokens, p99"),
        ({"fetch": point(floor_ratio_p50=1.6)}, "1.5 times its floor"),
        ({"fetch": point(itl_beside_s={"count": 100, "p95": estimate(0.0211)})}, "others' inter-token p95"),
        ({"fetch": point(session_overhead_p50_s=0.016)}, "at most 15 ms"),
    ],
)
def test_each_bar_can_be_missed(arms, bar):
    """One figure just beyond its bar misses that bar and no other."""
    (name,) = missed(result(**arms))
    assert bar in name


def test_a_few_turns_have_no_95th_percentile_to_judge():
    """It would be their slowest; the scenarios with many turns are judged by it."""
    few = figures(0.102, ttft_s={"count": 99, "p50": estimate(0.102), "p95": estimate(9.0)})
    names = [check.name for check in checks(result(auto=few))]
    assert not [name for name in names if "p95" in name and "auto" in name]


@pytest.mark.parametrize(
    ("changed", "bars"),
    [
        ({"count": 100, "p50": estimate(0.106), "p95": estimate(0.2)}, "TTFT p50"),
        ({"count": 100, "p50": estimate(0.1), "p95": estimate(0.22)}, "TTFT p95"),
    ],
)
def test_auto_is_compared_with_our_ways_and_with_all(changed, bars):
    """Where it is behind one of ours, it is behind the best of all as well."""
    found = missed(result(auto=figures(0.1, ttft_s=changed)))
    assert [name.partition("best ")[2] for name in found] == [f"of our ways, {bars}", f"of all, {bars}"]


def test_what_is_not_measured_is_missed():
    """A bar without its figure would else be met by a run that shows nothing."""
    nothing = dict.fromkeys(("speedup", "speedup_p99", "ceiling_p50", "ceiling_p99", "floor_ratio_p50"))
    content = result(
        fetch=point(**nothing, session_overhead_p50_s=None, itl_beside_s={"count": 0}),
        auto=figures(0.102, speedup=None, ttft_s={"count": 0}),
    )
    found = checks(content, ["long_agent", "slow_link"])
    unknown = [check.name for check in found if check.found == "not measured"]
    assert len(unknown) == 9
    assert not [check for check in found if check.passed and check.name in unknown]
    assert found[-1].name == "slow_link: measured"
    assert not found[-1].passed


def test_a_scenario_that_ended_early_is_missed():
    """Its rounds are there to read, and fewer than were asked for."""
    content = result()
    content["scenarios"]["long_agent"]["ended_early"] = "ReadError()"
    assert missed(content) == ["long_agent: nothing failed"]
