"""Statistics of benchmarks."""

import random

import pytest

from server_ext.benchmark.samples import quantile_with_interval, ratio_with_interval


def test_the_interval_holds_the_quantile_and_narrows_with_more_values():
    """More turns say more: the interval around the median becomes smaller, and the median lies in it."""
    draw = random.Random(1)
    few, many = ([draw.lognormvariate(0, 0.5) for _ in range(count)] for count in (10, 1000))
    wide, narrow = (quantile_with_interval(values, 0.5) for values in (few, many))
    assert wide is not None
    assert narrow is not None
    assert wide.low <= wide.value <= wide.high
    assert narrow.high - narrow.low < 0.3 * (wide.high - wide.low)
    assert narrow.low <= 1.0 <= narrow.high  # the true median


def test_equal_values_have_no_interval():
    """Where all turns took the same time, there is nothing uncertain."""
    found = quantile_with_interval([2.0] * 5, 0.99)
    assert found is not None
    assert (found.low, found.value, found.high) == (2.0, 2.0, 2.0)


def test_a_ratio_is_that_of_the_quantiles():
    """Ten times the time is a ratio of ten, with an interval around it."""
    draw = random.Random(2)
    fast = [draw.uniform(0.9, 1.1) for _ in range(50)]
    found = ratio_with_interval([10 * value for value in fast], fast)
    assert found is not None
    assert found.value == pytest.approx(10.0)
    assert 9.0 < found.low < 10.0 < found.high < 11.0


def test_nothing_measured_is_no_number():
    """No value is None, not a zero that somebody could plot."""
    assert quantile_with_interval([], 0.5) is None
    assert ratio_with_interval([], [1.0]) is None
    assert ratio_with_interval([1.0], []) is None


def test_the_same_values_give_the_same_interval():
    """A file can be made again from its samples."""
    values = [random.Random(3).random() for _ in range(30)]
    assert quantile_with_interval(values, 0.5) == quantile_with_interval(values, 0.5)
