"""What computing and fetching are taken to cost."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server_ext.core.rates import ConstantRates

RATES = ConstantRates(prefill_tokens_per_s=100, attention_tokens=1000, fetch_bytes_per_s=1e6, fetch_fixed_s=0.5)


def test_attention_makes_long_prompts_dearer_than_in_proportion():
    """At the length where attention costs as much as the weights, a prompt takes twice the linear time."""
    assert RATES.prefill_s(1000) == pytest.approx(20)
    assert RATES.prefill_s(1) == pytest.approx(0.01, rel=0.01)


@given(head=st.integers(0, 10_000), tail=st.integers(1, 10_000))
def test_computing_in_two_steps_costs_what_one_step_costs(head, tail):
    """What is cached already is neither paid again nor forgotten: tokens behind it attend to it."""
    assert RATES.prefill_s(head) + RATES.prefill_s(tail, num_cached=head) == pytest.approx(RATES.prefill_s(head + tail))


def test_a_fetch_has_a_fixed_cost():
    """Reading costs a fixed time, and its bytes."""
    assert RATES.fetch_s(0) == 0.5
    assert RATES.fetch_s(2_000_000) == 2.5
