"""Sessions that are made to fit."""

import pytest

from server_ext.traffic import PlannedSession, PlannedTurn, fitted, prompts

LONG = PlannedSession(
    40.0,
    (
        PlannedTurn(0.0, False, 10_000, 500),
        PlannedTurn(20.0, True, 9_500, 200),
        PlannedTurn(8.0, True, 2_000, 100, kept_tokens=5_000),
    ),
)


def test_the_longest_prompt_fits():
    """20,000 tokens become 1,000; what is reused of each prompt stays the same part of it."""
    small = fitted(LONG, max_tokens=1_064, max_output_tokens=64)
    assert [turn.delta_tokens for turn in small.turns] == [500, 475, 100]
    assert [turn.output_tokens for turn in small.turns] == [25, 10, 5]
    assert small.turns[2].kept_tokens == 250
    assert max(prompt for prompt, _ in prompts(small)) == 1_000


def test_a_session_that_fits_stays_as_it_is():
    """Nothing is made longer, and gaps are divided only where that is asked for."""
    assert fitted(LONG, max_tokens=100_000, max_output_tokens=500) == LONG


def test_gaps_and_starts_are_divided_alike():
    """The order in which sessions come back stays."""
    fast = fitted(LONG, max_tokens=100_000, max_output_tokens=500, time_divisor=20)
    assert fast.start_s == 2.0
    assert [turn.gap_s for turn in fast.turns] == [0.0, 1.0, 0.4]


@pytest.mark.parametrize(("max_tokens", "max_output_tokens", "divisor"), [(64, 64, 1.0), (64, 0, 1.0), (64, 8, 0.0)])
def test_numbers_that_fit_nothing_are_refused(max_tokens, max_output_tokens, divisor):
    """There must be room for a prompt beside the answer."""
    with pytest.raises(ValueError, match="too small"):
        fitted(LONG, max_tokens=max_tokens, max_output_tokens=max_output_tokens, time_divisor=divisor)
