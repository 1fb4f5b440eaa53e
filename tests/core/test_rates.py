"""What computing and fetching are taken to cost."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from server_ext.core.rates import ConstantRates, LearnedRates, MarginalRates, Rates

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


# ---------------------------------------------------------------- learned rates


def learned():
    """Return rates of a slow machine, from ten turns of each kind."""
    rates = LearnedRates(ConstantRates(attention_tokens=6000))
    for i in range(10):
        num_tokens = 100 + 300 * (i % 3)
        rates.observe_prefill(0.05 + 0.002 * num_tokens, num_tokens, num_cached=1000)
        rates.observe_append(0.1 + 0.004 * num_tokens, num_tokens, num_cached=1000)
        rates.observe_fetch(0.03 + num_tokens * 1e-5, num_tokens * 1000, pair="p")
        rates.observe_handover(0.06 + num_tokens * 1e-5, num_tokens * 1000, pair="p")
    return rates


def test_each_cost_is_learned_for_itself():
    """Prefilling, appending, fetching and handing over have rates of their own."""
    rates = learned()
    assert rates.prefill_s(400, num_cached=1000) == pytest.approx(0.85, rel=0.1)
    assert rates.append_s(400, num_cached=1000) == pytest.approx(1.7, rel=0.1)
    assert rates.fetch_s(400_000, pair="p") == pytest.approx(0.034, rel=0.1)
    assert rates.handover_s(400_000, pair="p") == pytest.approx(0.064, rel=0.1)


def test_a_prefill_gets_dearer_behind_more_tokens():
    """The learned rate keeps its quadratic term."""
    rates = learned()
    assert rates.prefill_s(400, num_cached=6000) > rates.prefill_s(400, num_cached=1000)


def test_a_pairs_first_transfers_stand_apart():
    """The handshake is paid once; it is not what the next transfer is expected to cost."""
    rates = LearnedRates()
    before = rates.fetch_s(10**6, pair="p"), rates.handover_s(10**6, pair="p")
    rates.observe_fetch(6.0, 10**6, pair="p")
    rates.observe_handover(7.0, 10**6, pair="p")
    assert (rates.fetch_s(10**6, pair="p"), rates.handover_s(10**6, pair="p")) == before
    rates.observe_fetch(0.1, 10**6, pair="p")
    assert rates.fetch_s(10**6, pair="p") == pytest.approx(0.1)


def test_pairs_are_learned_apart():
    """A slow link to one P says nothing of another."""
    rates = LearnedRates()
    for _ in range(3):
        rates.observe_fetch(5.0, 10**6, pair="far")
    assert rates.fetch_s(10**6, pair="near") < 0.1


def test_a_link_is_known_from_either_direction():
    """What was handed over tells what a fetch will take, and the other way round."""
    handed, fetched = LearnedRates(), LearnedRates()
    for _ in range(3):
        handed.observe_handover(5.0, 10**8, pair="p")
        fetched.observe_fetch(5.0, 10**8, pair="p")
    assert handed.fetch_s(10**8, pair="p") > 2
    assert fetched.handover_s(10**8, pair="p") == pytest.approx(5.0 + fetched.decode_step_s)


@given(
    st.lists(st.tuples(st.integers(1, 6000), st.integers(0, 6000), st.floats(0.01, 100)), min_size=1, max_size=12),
    st.integers(1, 4000),
    st.integers(0, 6000),
)
@example([(1000, 0, 2.0)], 100, 900)
def test_what_was_never_appended_costs_what_p_takes(prefills, num_tokens, num_cached):
    """D is taken to be as fast as P, exactly: a hand-over for nothing is never the cheaper way."""
    rates = LearnedRates()
    for num_computed, num_before, seconds in prefills:
        rates.observe_prefill(seconds, num_computed, num_cached=num_before)
    cost = {"num_tokens": num_tokens, "num_cached": num_cached}
    assert rates.append_s(**cost) == rates.prefill_s(**cost)


def test_one_append_tells_a_speed_and_prefills_the_shape():
    """After one long append the cost of a short one follows what prefills of both lengths have shown."""
    rates = LearnedRates(ConstantRates(attention_tokens=6000))
    rates.observe_append(4.1, 2000)
    for _ in range(10):
        rates.observe_prefill(2.05, 2000)
        rates.observe_prefill(0.06, 10, num_cached=2000)
    assert rates.append_s(10, num_cached=2000) == pytest.approx(0.12, rel=0.3)


def test_one_long_append_and_short_prefills_tell_the_cost_of_a_short_append():
    """Two engines' few turns of different lengths are read together, as on the machine where these were measured."""
    rates = LearnedRates(ConstantRates(attention_tokens=6100))
    rates.observe_append(1.53, 1284)
    for num_cached in (1307, 1412, 1517, 1622):
        rates.observe_prefill(0.15, 82, num_cached=num_cached)
    assert rates.append_s(82, num_cached=1700) < 0.26  # 0.2 s it was; by that append alone it would be 0.37 s
    assert 1.2 < rates.prefill_s(1500) < 2.2  # 1.8 s it was


def test_steps_show_what_a_prompt_on_d_costs_its_streams():
    """The extra time of steps with prompt tokens in them is what each stream waits, per token."""
    rates = LearnedRates()
    for _ in range(5):
        rates.observe_step(0.02, num_decodes=3, num_prompt_tokens=0)
        rates.observe_step(0.12, num_decodes=3, num_prompt_tokens=200)
        rates.observe_step(9.0, num_decodes=0, num_prompt_tokens=200)
    assert rates.decode_step_s == pytest.approx(0.02)
    assert rates.stall_s(400) == pytest.approx(0.2)


def test_hoped_rates_are_those_of_better_days():
    """A link that became slow may be repaired: the view hopes for the prior's, and learning goes on beside it."""
    rates = learned()
    for _ in range(5):
        rates.observe_fetch(9.0, 400_000, pair="p")
    assert rates.fetch_s(400_000, pair="p") > 5
    assert rates.hoped().fetch_s(400_000, pair="p") < 0.1
    assert rates.hoped().prefill_s(400) <= rates.prefill_s(400)
    assert rates.fetch_s(400_000, pair="p") > 5


def test_leases_are_ranked_by_what_their_blocks_add():
    """A lease's blocks spare computing, not the fixed time of the prefill that runs in any case."""
    rates = learned()
    marginal: Rates = MarginalRates(rates)
    assert marginal.prefill_s(0) == marginal.fetch_s(0) == 0
    assert marginal.prefill_s(400, num_cached=1000) == rates.prefill_s(400, num_cached=1000) - rates.prefill_s(0)
    assert marginal.fetch_s(1000) == rates.fetch_s(1000) - rates.fetch_s(0)
