"""A cost that is learned online: what it converges to, what it ignores, and what it never becomes."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server_ext.core.linear_fit import LinearFit


def link(rng=None, *, fixed_s=0.02, byte_s=1e-9):
    """Return how long a transfer takes, with a noise of 10 % where there is a `rng`."""
    return lambda num_bytes: (fixed_s + byte_s * num_bytes) * (rng.lognormvariate(0, 0.1) if rng else 1)


def teach(fit, cost, amounts):
    """Let a fit observe a cost at each of the amounts."""
    for amount in amounts:
        fit.observe(cost(amount), amount)


def test_one_observation_sets_the_speed():
    """A prior of a machine a hundred times faster is scaled as a whole; at the same amount it is exact at once."""
    fit = LinearFit(0.0002, 1e-11)
    fit.observe(0.12, 100e6)
    assert fit.expect_s(100e6) == pytest.approx(0.12)
    assert fit.expect_s(200e6) > 0.12


def test_fixed_time_and_rate_are_told_apart():
    """Some small and some large amounts, with noise, and both ends are known to 15 %."""
    fit, cost = LinearFit(0.1, 1e-10), link(random.Random(1))
    teach(fit, cost, [1e6, 300e6] * 20)
    for num_bytes in (1e6, 100e6, 300e6):
        assert fit.expect_s(num_bytes) == pytest.approx(0.02 + 1e-9 * num_bytes, rel=0.15)


def test_a_second_amount_is_learned_too():
    """Attention, which grows with the square, is told apart from what grows with the length."""
    fit = LinearFit(0.01, 1e-3, 1e-8)
    for length in [100, 1000, 4000, 8000] * 10:
        fit.observe(0.05 + 2e-3 * length + 3e-7 * length**2, length, length**2)
    for length in (100, 2000, 8000):
        assert fit.expect_s(length, length**2) == pytest.approx(0.05 + 2e-3 * length + 3e-7 * length**2, rel=0.15)


@pytest.mark.parametrize("factor", [0.1, 5, 100])
def test_one_strange_turn_is_noise(factor):
    """A single observation far off changes nothing, in either direction."""
    fit, cost = LinearFit(0.02, 1e-9), link(random.Random(2))
    teach(fit, cost, [50e6, 150e6] * 10)
    before = fit.coefficients
    fit.observe(factor * cost(100e6), 100e6)
    assert fit.coefficients == before


@pytest.mark.parametrize("factor", [0.02, 4, 300])
def test_two_strange_turns_are_news(factor):
    """Where a link changes its rate a lot, the expectation follows with the second turn, at that amount to 20 %."""
    fit = LinearFit(0.02, 1e-9)
    teach(fit, link(), [100e6] * 20)
    changed = link(byte_s=factor * 1e-9)
    teach(fit, changed, [100e6] * 2)
    assert fit.expect_s(100e6) == pytest.approx(changed(100e6), rel=0.2)


@pytest.mark.parametrize("factor", [0.02, 0.3, 0.7, 1.5, 4, 300])
def test_any_change_is_followed_within_five_turns(factor):
    """Large or small, up or down: after five turns the expectation is within 10 %."""
    fit = LinearFit(0.02, 1e-9)
    teach(fit, link(), [100e6] * 20)
    changed = link(byte_s=factor * 1e-9)
    teach(fit, changed, [100e6] * 5)
    assert fit.expect_s(100e6) == pytest.approx(changed(100e6), rel=0.1)


def test_strange_turns_with_small_ones_between_are_news():
    """A slower link shows at large amounts only; as-expected small ones between them do not hide it."""
    fit = LinearFit(0.02, 1e-9)
    teach(fit, link(), [1e3, 100e6] * 10)
    slow = link(byte_s=50e-9)
    teach(fit, slow, [100e6, 1e3, 1e3, 100e6, 1e3])
    assert fit.expect_s(100e6) == pytest.approx(slow(100e6), rel=0.2)


def test_two_strange_turns_in_opposite_directions_are_noise():
    """One far above and one far below mean no change."""
    fit = LinearFit(0.02, 1e-9)
    teach(fit, link(), [100e6] * 20)
    before = fit.coefficients
    fit.observe(2.0, 100e6)
    fit.observe(0.01, 100e6)
    assert fit.coefficients == before


def test_hope_is_never_above_the_expectation_and_remembers_better_times():
    """What was fast a moment ago may be again; after hundreds of slow turns nobody hopes for it."""
    fit = LinearFit(0.02, 1e-9)
    teach(fit, link(), [50e6, 100e6] * 20)
    slow = link(byte_s=30e-9)
    teach(fit, slow, [50e6, 100e6] * 3)
    assert fit.hope_s(100e6) < 0.3 * fit.expect_s(100e6)
    teach(fit, slow, [50e6, 100e6] * 200)
    assert 0.6 * fit.expect_s(100e6) < fit.hope_s(100e6) <= fit.expect_s(100e6)


def test_what_another_fit_knows_can_be_taken():
    """Taken knowledge is expected at once, and one observation of one's own rescales it."""
    known, fit = LinearFit(0.1, 1e-10), LinearFit(0.1, 1e-10)
    teach(known, link(), [1e6, 300e6] * 20)
    fit.take_from(known)
    assert fit.expect_s(100e6) == known.expect_s(100e6)
    fit.observe(3 * known.expect_s(300e6), 300e6)
    assert fit.expect_s(1e6) == pytest.approx(3 * known.expect_s(1e6))


@given(
    observations=st.lists(
        st.tuples(
            st.floats(allow_nan=True, allow_infinity=True) | st.floats(1e-6, 1e4),
            st.integers(0, 10**12),
            st.integers(0, 10**12),
        ),
        max_size=40,
    ),
    amount=st.integers(0, 10**12),
)
def test_whatever_is_observed_an_expectation_is_a_positive_number(observations, amount):
    """Nothing that comes in makes a rate negative, infinite or no number, and more never costs less."""
    fit = LinearFit(0.01, 1e-9, 1e-14)
    for seconds, first, second in observations:
        fit.observe(seconds, first, second)
        assert all(0 <= coefficient < math.inf for coefficient in fit.coefficients)
        assert 0 < fit.hope_s(amount, amount) <= fit.expect_s(amount, amount) < math.inf
        assert fit.expect_s(amount + 1, amount) >= fit.expect_s(amount, amount)
