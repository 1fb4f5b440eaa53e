import json

import pytest


def failed(result):
    """The names of the checks that a result does not pass."""
    return [check.name for check in result.checks() if not check.passed]


def test_a_good_result_passes_every_check(make_result):
    """Each number is inside its limit."""
    assert failed(make_result()) == []


def test_the_ratio_is_that_of_the_long_turns(make_result):
    """The first turn, which holds nothing, does not count."""
    result = make_result()
    assert result.speedups == pytest.approx([1.0, 14.0])
    assert result.ratio == pytest.approx(14.0)
    assert result.ceiling_ratio == pytest.approx(21.0 / 1.2)


def test_the_overhead_is_render_begin_and_settle(make_result):
    """The median over the turns of what the session layer adds."""
    assert make_result().session_overhead_p50_s == pytest.approx(0.020)


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"fetched": 0}, "every turn but the first fetched its history"),
        ({"fetched": 1899}, "at least 95% of what was held was fetched"),
        ({"fetched_without": 32}, "the arm without reuse reused nothing"),
        ({"token_ids": (5, 7)}, "both arms generated the same tokens"),
        ({"ttft_s": 21.0 / 7.9}, "first token at least 8 times sooner"),
        ({"ttft_s": 2.0}, "at least 70% of the physical limit"),
        ({"begin_s": 0.016}, "the session layer adds at most 30 ms to a turn (p50)"),
        ({"idle_cpu_cores": 0.11}, "idle engines that hold a lease use at most 0.10 cores"),
        ({"idle_lease_state": "expired"}, "idle engines that hold a lease use at most 0.10 cores"),
    ],
)
def test_a_bad_number_fails_its_check(make_result, changes, name):
    """Each expectation is judged by the number that it is about."""
    assert name in failed(make_result(**changes))


def test_without_a_long_turn_nothing_passes_for_fast(make_result):
    """A run that was too short has no ratio, and fails instead of dividing by nothing."""
    short = make_result().turns[:1]
    result = make_result(turns=short, turns_without_reuse=short)
    assert result.ratio == result.ceiling_ratio == 0.0
    assert "first token at least 8 times sooner" in failed(result)
    assert "every turn but the first fetched its history" in failed(result)


def test_the_file_has_every_number(make_result):
    """What is written can be read back, with the names that the documentation uses."""
    data = json.loads(json.dumps(make_result().to_json()))
    assert data["tokens_identical"] is True
    assert data["ratio"] == pytest.approx(14.0)
    assert set(data) == {
        "turns",
        "turns_without_reuse",
        "ratio",
        "ceiling_ratio",
        "prefill_rate",
        "tokens_identical",
        "session_overhead_p50_s",
        "idle_cpu_cores",
        "versions",
    }
    assert data["turns"][1] == {
        "turn": 2,
        "prompt_tokens": 2100,
        "outcome": "fetched",
        "reason": "forced",
        "held_tokens": 2000,
        "reused_tokens": 0,
        "fetched_tokens": 2000,
        "computed_tokens": 100,
        "generated_tokens": 2,
        "ttft_s": 1.5,
        "timings_s": {
            "render": 0.010,
            "begin": 0.005,
            "prefill": 1.2,
            "fetch": 0.2,
            "handover": None,
            "settle": 0.005,
            "ttft": None,
        },
    }
