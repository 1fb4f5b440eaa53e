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
        "ttft_s": {"count": 100, "p50": estimate(p50_s), "p95": estimate(2 * p50_s)},
        "itl_beside_s": {"p95": estimate(0.02)},
        "speedup": estimate(1.0 / p50_s),
        "session_overhead_p50_s": 0.006,
        "session_overhead_beside_p50_s": 0.02,
        "points": {},
    } | changed


def result(**arms):
    """A file with one scenario in which all is well, but for what is changed."""
    point = {"speedup": estimate(10.0), "speedup_p99": estimate(9.0), "ceiling_p50": 12.0, "floor_ratio_p50": 1.2}
    good = {
        "no_reuse": figures(1.0),
        "local": figures(0.11),
        "fetch": figures(0.1, points={"2000": point}),
        "auto": figures(0.102),
    }
    return {"scenarios": {"long_agent": {"arms": good | arms}}}


def missed(content):
    """The names of the bars that are missed."""
    return [check.name for check in checks(content) if not check.passed]


def test_a_good_run_misses_nothing():
    """Every bar of the good run is judged and met."""
    names = [check.name for check in checks(result())]
    assert len(names) == 10
    assert missed(result()) == []


def point(**changed):
    """Figures of `fetch` whose only point is changed."""
    good = result()["scenarios"]["long_agent"]["arms"]["fetch"]["points"]["2000"]
    return figures(0.1, points={"2000": good | changed})


@pytest.mark.parametrize(
    ("arms", "bar"),
    [
        ({"local": figures(0.11, tokens_wrong=1)}, "no wrong token"),
        ({"auto": figures(0.1, ttft_s={"count": 100, "p50": estimate(0.106), "p95": estimate(0.2)})}, "TTFT p50"),
        ({"auto": figures(0.1, ttft_s={"count": 100, "p50": estimate(0.1), "p95": estimate(0.22)})}, "TTFT p95"),
        ({"auto": figures(0.1, speedup=estimate(0.95))}, "not worse than no_reuse"),
        ({"fetch": point(speedup=estimate(7.9), ceiling_p50=8.0)}, "at least 8x at 2000"),
        ({"fetch": point(ceiling_p50=14.5, speedup_p99=None)}, "70% of the limit at 2000 tokens, p50"),
        ({"fetch": point(speedup_p99=estimate(8.0))}, "70% of the limit at 2000 tokens, p99"),
        ({"fetch": point(floor_ratio_p50=1.6)}, "1.5 times its floor"),
        ({"fetch": figures(0.1, itl_beside_s={"p95": estimate(0.0211)})}, "others' inter-token p95"),
        ({"fetch": figures(0.1, session_overhead_p50_s=0.016)}, "at most 15 ms"),
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


def test_what_others_offer_is_printed_beside_and_not_judged():
    """One engine that is faster than all of our ways misses no bar, and its time is there to read."""
    found = checks(result(aggregated=figures(0.01)))
    assert all(check.passed for check in found)
    assert any("beside it aggregated 0.010 s" in check.found for check in found)


def test_a_run_with_one_arm_has_nothing_to_be_behind():
    """`auto` alone is the best there is."""
    content = {"scenarios": {"long_agent": {"arms": {"auto": figures(0.1)}}}}
    assert missed(content) == []
