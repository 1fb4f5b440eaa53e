"""What the generator promises: the published quantiles, one seed one traffic, contexts that fit."""

import math
from dataclasses import replace
from itertools import pairwise
from statistics import mean, median, quantiles

import pytest

from server_ext.traffic import AGENT, SMALL, LogNormal, generate, prompts


def later_turns(sessions):
    """Return all turns that have one before them."""
    return [turn for session in sessions for turn in session.turns[1:]]


def test_the_same_seed_gives_the_same_sessions():
    """Two runs with one seed agree in everything, and another seed gives other sessions."""
    first = list(generate(SMALL, 20, seed=7, rate_per_s=1))
    assert first == list(generate(SMALL, 20, seed=7, rate_per_s=1))
    assert first != list(generate(SMALL, 20, seed=8, rate_per_s=1))


def test_a_session_does_not_depend_on_how_many_there_are_nor_on_the_rate():
    """The n-th session's turns are the same in a longer and in a denser run."""
    few = list(generate(AGENT, 5, seed=3, rate_per_s=1))
    many = list(generate(AGENT, 50, seed=3, rate_per_s=9))
    assert [session.turns for session in few] == [session.turns for session in many[:5]]


def test_the_workload_has_the_quantiles_that_were_recorded():
    """Medians and 90th percentiles lie within a quarter of the recorded ones, and so do the shares."""
    sessions = list(generate(AGENT.fitting(1_000_000), 2_000, seed=1, rate_per_s=1))
    turns = later_turns(sessions)
    assert median(len(session.turns) for session in sessions) == pytest.approx(45, rel=0.1)
    assert mean(len(session.turns) for session in sessions) == pytest.approx(68.5, rel=0.1)
    assert median(session.turns[0].delta_tokens for session in sessions) == pytest.approx(24_500, rel=0.1)
    outputs = [turn.output_tokens for turn in turns]
    assert median(outputs) == pytest.approx(216, rel=0.05)
    assert quantiles(outputs, n=10)[8] == pytest.approx(899, rel=0.05)
    growths = [b - a for one in sessions for (a, _), (b, _) in pairwise(prompts(one))]
    assert median(growths) == pytest.approx(646, rel=0.25)
    assert quantiles(growths, n=10)[8] == pytest.approx(3_511, rel=0.1)
    for is_tool, p50, p90 in ((True, 9, 71), (False, 128, 1_893)):
        gaps = [turn.gap_s for turn in turns if turn.after_tool is is_tool]
        assert median(gaps) == pytest.approx(p50, rel=0.05)
        assert quantiles(gaps, n=10)[8] == pytest.approx(p90, rel=0.1)
    assert mean(turn.after_tool for turn in turns) == pytest.approx(0.861, abs=0.005)
    assert mean(turn.kept_tokens is not None for turn in turns) == pytest.approx(0.028, abs=0.003)
    reused = sum(kept for one in sessions for _, kept in prompts(one))
    assert reused / sum(prompt for one in sessions for prompt, _ in prompts(one)) > 0.96


@pytest.mark.parametrize("workload", [AGENT, SMALL, AGENT.fitting(32_768)])
def test_every_turn_fits_the_context(workload):
    """No prompt with its answer is longer than the context, and every delta and answer has a token."""
    for session in generate(workload, 200, seed=2, rate_per_s=None):
        for turn, (prompt, kept) in zip(session.turns, prompts(session), strict=True):
            assert prompt + turn.output_tokens <= workload.max_context_tokens
            assert turn.delta_tokens >= 1
            assert turn.output_tokens >= 1
            assert kept >= 0


def test_sessions_start_at_the_rate():
    """Starts are in order and as dense as asked for; without a rate all begin at once."""
    sessions = list(generate(SMALL, 2_000, seed=4, rate_per_s=5))
    starts = [session.start_s for session in sessions]
    assert starts == sorted(starts)
    assert starts[-1] == pytest.approx(400, rel=0.1)
    assert {session.start_s for session in generate(SMALL, 5, seed=4, rate_per_s=None)} == {0.0}


def test_faster_divides_gaps_and_leases_by_one_factor():
    """Only the gaps of a faster workload change, and leases are told by how much."""
    faster = AGENT.faster(20)
    for slow, fast in zip(
        later_turns(generate(AGENT, 5, seed=5, rate_per_s=None)),
        later_turns(generate(faster, 5, seed=5, rate_per_s=None)),
        strict=True,
    ):
        assert fast.gap_s == pytest.approx(slow.gap_s / 20)
        assert replace(fast, gap_s=slow.gap_s) == slow
    assert faster.scaled_s(480) == 24


def test_a_compaction_keeps_the_system_prompt():
    """A turn that would outgrow the context keeps the system prompt alone."""
    workload = replace(AGENT, compaction_share=0, early_edit_share=0, late_edit_share=0)
    kept = {turn.kept_tokens for turn in later_turns(generate(workload, 300, seed=6, rate_per_s=None))}
    assert kept == {None, workload.system_tokens}


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"tool_share": 1.5}, "tool_share"),
        ({"time_divisor": 0}, "time_divisor"),
        ({"max_turns": 0}, "max_turns"),
        ({"num_turns": LogNormal(0, 1)}, "num_turns"),
        ({"compaction_share": 0.9, "late_edit_share": 0.2}, "do not append"),
        ({"max_context_tokens": 20_000}, "max_context_tokens"),
    ],
)
def test_a_workload_that_makes_no_sense_is_refused_by_name(changes, named):
    """The error names the value that is out of its limits."""
    with pytest.raises(ValueError, match=named):
        replace(AGENT, **changes)


@pytest.mark.parametrize(("num", "seed", "rate"), [(-1, 0, 1), (1, -1, 1), (1, 0, 0), (1, 0, math.nan)])
def test_a_number_that_makes_no_sense_is_refused(num, seed, rate):
    """Negative counts and seeds, and a rate that is not above 0, are errors before anything is drawn."""
    with pytest.raises(ValueError, match="give 0 or more"):
        list(generate(SMALL, num, seed=seed, rate_per_s=rate))
