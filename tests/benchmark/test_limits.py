import json

import pytest

from server_ext.analysis.hardware import read_model
from server_ext.benchmark.limits import PrefillRate, ceiling

RATE = PrefillRate(fixed_s=0.05, token_s=0.005, attention_tokens=5000.0)
NO_ATTENTION = float("inf")


def test_a_prompt_costs_the_same_in_one_piece_or_in_two():
    """Computing a history and then a delta behind it takes as long as computing both at once, but for one call more."""
    assert RATE.compute_s(2000) + RATE.compute_s(100, 2000) == pytest.approx(RATE.compute_s(2100) + 0.05)


def test_attention_costs_as_much_as_the_weights_at_its_length():
    """A prompt of A tokens takes twice the time of its weights alone."""
    assert RATE.compute_s(5000) == pytest.approx(0.05 + 2 * 5000 * 0.005)


def test_a_delta_pays_for_attention_over_its_history():
    """The same tokens take longer behind a history than alone."""
    assert RATE.compute_s(100, 2000) == pytest.approx(0.05 + 0.005 * (100 + (2100**2 - 2000**2) / 5000))
    assert RATE.compute_s(100, 2000) > RATE.compute_s(100)


def test_fit_finds_the_rate_that_made_the_points():
    """Times without noise give back the rate and what each prefill costs."""
    rate = PrefillRate.fit(((num, RATE.compute_s(num)) for num in (20, 1900, 2500, 3000)), 5000.0)
    assert (rate.fixed_s, rate.token_s) == pytest.approx((RATE.fixed_s, RATE.token_s))


def test_what_a_prefill_costs_at_least_comes_from_the_short_ones():
    """Long prompts are off by more seconds than a short one takes: that says nothing of the short one."""
    noisy = [
        (num, RATE.compute_s(num) * factor) for num, factor in ((5800, 1.1), (6000, 0.9), (6100, 1.12), (6200, 0.9))
    ]
    rate = PrefillRate.fit([*((20, RATE.compute_s(20)) for _ in range(3)), *noisy], 5000.0)
    assert rate.compute_s(20) == pytest.approx(RATE.compute_s(20), rel=0.05)
    assert rate.token_s == pytest.approx(RATE.token_s, rel=0.15)


def test_a_prefill_that_was_held_up_bends_nothing():
    """One of five took five times as long."""
    points = [(num, RATE.compute_s(num)) for num in (20, 500, 1500, 2500)] + [(2000, 5 * RATE.compute_s(2000))]
    assert PrefillRate.fit(points, 5000.0).token_s == pytest.approx(RATE.token_s, rel=0.1)


@pytest.mark.parametrize("points", [[], [(100, 1.0), (100, 1.1)]])
def test_too_few_points_are_an_error(points):
    """Without turns of different lengths that computed their prompt there is no rate."""
    with pytest.raises(ValueError, match="too few turns"):
        PrefillRate.fit(points, 5000.0)


def test_the_length_of_attention_comes_from_the_model(tmp_path):
    """SmolLM2-135M: 106 million weights outside its embeddings, 30 layers, 576 wide."""
    config = {
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "num_hidden_layers": 30,
        "vocab_size": 49152,
        "max_position_embeddings": 8192,
    }
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    assert read_model(path).attention_tokens == pytest.approx(106.2e6 / (30 * 576), rel=0.01)


def test_the_ceiling_is_recompute_over_fetch_and_delta():
    """Whole prompt computed, divided by the read plus the delta computed."""
    linear = PrefillRate(0.0, 0.01, NO_ATTENTION)
    assert ceiling(linear, held_tokens=2000, prompt_tokens=2100, fetch_s=0.5) == pytest.approx(21.0 / 1.5)
