import pytest

from bench._model import PrefillRate, ceiling

RATE = PrefillRate(linear_s=0.005, quadratic_s=1e-6)


def test_a_prompt_costs_the_same_in_one_piece_or_in_two():
    """Computing a history and then a delta behind it takes as long as computing both at once."""
    assert RATE.compute_s(2000) + RATE.compute_s(100, 2000) == pytest.approx(RATE.compute_s(2100))


def test_a_delta_pays_for_attention_over_its_history():
    """The same tokens take longer behind a history than alone."""
    assert RATE.compute_s(100, 2000) == pytest.approx(0.005 * 100 + 1e-6 * (2100**2 - 2000**2))
    assert RATE.compute_s(100, 2000) > RATE.compute_s(100)


def test_fit_finds_the_rate_that_made_the_points():
    """Times without noise give back the linear and the quadratic part."""
    rate = PrefillRate.fit((num, RATE.compute_s(num)) for num in (1200, 1900, 2500, 3000))
    assert rate.linear_s == pytest.approx(RATE.linear_s)
    assert rate.quadratic_s == pytest.approx(RATE.quadratic_s)


@pytest.mark.parametrize(
    ("points", "expected"),
    [
        ([(1000, 10.0), (2000, 18.0)], PrefillRate(46.0 / 5000, 0.0)),
        ([(1000, 1.0), (2000, 8.0)], PrefillRate(0.0, 33.0 / 17e6)),
    ],
)
def test_no_part_of_a_rate_is_negative(points, expected):
    """Where noise asks for a negative part, that part is zero and the other one fits best alone."""
    rate = PrefillRate.fit(points)
    assert rate.linear_s == pytest.approx(expected.linear_s)
    assert rate.quadratic_s == pytest.approx(expected.quadratic_s)


def test_points_of_one_length_give_a_linear_rate():
    """One length cannot tell the two parts apart."""
    assert PrefillRate.fit([(100, 1.0), (100, 3.0)]) == PrefillRate(0.02, 0.0)


def test_no_points_are_an_error():
    """Without a turn that computed its prompt there is no rate."""
    with pytest.raises(ValueError, match="no prefill rate"):
        PrefillRate.fit([])


def test_the_ceiling_is_recompute_over_fetch_and_delta():
    """Whole prompt computed, divided by the read plus the delta computed."""
    linear = PrefillRate(0.01, 0.0)
    assert ceiling(linear, held_tokens=2000, prompt_tokens=2100, fetch_s=0.5) == pytest.approx(21.0 / 1.5)
