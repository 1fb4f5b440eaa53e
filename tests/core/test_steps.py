"""What the scheduler's steps tell: who runs, and how long steps take."""

import pytest

from server_ext.core.rates import LearnedRates
from server_ext.core.steps import StepWatch


@pytest.fixture
def rates():
    """Rates that have seen no step."""
    return LearnedRates()


def test_requests_run_from_their_step_to_their_end(rates):
    """Whoever was in the last step and has not ended since is running."""
    watch = StepWatch(rates)
    assert watch.count_running() == 0
    watch.scheduled({"a": 40, "b": 1}, now_s=0)
    assert watch.count_running() == 2
    watch.finished("a")
    watch.finished("unknown")
    assert watch.count_running() == 1
    watch.scheduled({"c": 1}, now_s=1)
    assert watch.count_running() == 1
    watch.finished("c")
    assert watch.count_running() == 0


def test_a_step_lasts_until_the_next_one(rates):
    """Steps that generate only set the length of a decode step, and prompts in them what they add."""
    watch = StepWatch(rates)
    for i in range(3):
        watch.scheduled({"a": 1, "b": 1}, now_s=i * 0.03)
    watch.scheduled({"a": 1, "b": 50}, now_s=0.09)
    watch.scheduled({"a": 1, "b": 1}, now_s=0.22)
    assert rates.decode_step_s == pytest.approx(0.03)
    assert rates.stall_s(100) == pytest.approx(0.2)


def test_an_idle_engine_tells_nothing(rates):
    """The time between the last request's end and the next one's first step is no step."""
    watch = StepWatch(rates)
    before = rates.decode_step_s
    watch.scheduled({"a": 1}, now_s=0)
    watch.finished("a")
    watch.scheduled({"b": 1}, now_s=100)
    watch.scheduled({}, now_s=100.03)
    assert rates.decode_step_s == pytest.approx(0.03)
    watch.scheduled({"b": 1}, now_s=200)
    watch.scheduled({"b": 1}, now_s=200.03)
    assert rates.decode_step_s == pytest.approx(0.03)
    assert before != rates.decode_step_s
