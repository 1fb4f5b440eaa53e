"""Conversations of benchmarks."""

from dataclasses import replace

import pytest

from server_ext.benchmark.scenarios import LONG_AGENT, Scenario, find_delta_ids, growing
from server_ext.traffic import PlannedSession, PlannedTurn


def scenario(*sessions: PlannedSession) -> Scenario:
    """A scenario of given sessions."""
    return Scenario(name="made", what="", plan=lambda _: sessions, arms=("no_reuse",))


def num_words(text: str) -> int:
    """How many words a text has."""
    return len(text.split())


def test_a_round_is_the_same_for_every_arm_and_every_process():
    """Seed and number say all about a round; another number is another round."""
    first, again, other = (LONG_AGENT.scripts(number, seed=1) for number in (0, 0, 1))
    assert first == again
    assert first != other
    assert first != LONG_AGENT.scripts(0, seed=2)


def test_texts_are_as_long_as_planned():
    """A word is about a token: the first prompt is system and user together, later turns are their delta."""
    turns = (PlannedTurn(0.0, False, 100, 8), PlannedTurn(2.0, True, 30, 4))
    (script,) = scenario(PlannedSession(1.5, turns)).scripts(0, seed=0)
    assert script.start_s == 1.5
    assert num_words(script.system) + num_words(script.asks[0].delta) == 100
    assert [(num_words(ask.delta), ask.output_tokens, ask.gap_s) for ask in script.asks[1:]] == [(30, 4, 2.0)]
    assert all(ask.rewind_to is None for ask in script.asks)


def test_an_edited_history_goes_back_to_the_last_turn_that_stays_whole():
    """What an edit leaves of a turn is said again: a rewind, and a delta that is longer by it."""
    turns = (
        PlannedTurn(0.0, False, 100, 10),  # context 110
        PlannedTurn(0.0, True, 30, 10),  # context 150
        PlannedTurn(0.0, True, 20, 10, kept_tokens=120),  # 10 tokens of the second turn stay
    )
    (script,) = scenario(PlannedSession(0.0, turns)).scripts(0, seed=0)
    assert [ask.rewind_to for ask in script.asks] == [None, None, 1]
    assert num_words(script.asks[2].delta) == 10 + 20


def test_an_edit_in_the_first_turn_begins_anew():
    """Nothing of the conversation stays but the system prompt."""
    turns = (PlannedTurn(0.0, False, 100, 10), PlannedTurn(0.0, True, 20, 10, kept_tokens=60))
    (script,) = scenario(PlannedSession(0.0, turns)).scripts(0, seed=0)
    assert script.asks[1].rewind_to == 0
    assert num_words(script.asks[1].delta) == 80 - num_words(script.system)


def test_growing_agents_stay_within_their_deltas():
    """Every later turn adds a number of tokens between the two that were given."""
    sessions = growing([2000, 3000], num_turns=20, delta_tokens=(64, 128), output_tokens=32)(7)
    assert [session.turns[0].delta_tokens for session in sessions] == [2000, 3000]
    deltas = [turn.delta_tokens for session in sessions for turn in session.turns[1:]]
    assert all(64 <= delta <= 128 for delta in deltas)
    assert len(set(deltas)) > 10


def test_requests_beside_several_agents_are_refused():
    """Whose latency would it be? The error says what to set."""
    with pytest.raises(ValueError, match="at_once=1, got 2"):
        replace(LONG_AGENT, at_once=2)


def test_a_delta_is_what_lies_behind_the_history():
    """The ids of a delta are those of the prompt without what was there; anything else is an error."""
    assert find_delta_ids([1, 2, 3, 4], [1, 2]) == [3, 4]
    assert find_delta_ids([1, 2], []) == [1, 2]
    with pytest.raises(ValueError, match="does not continue"):
        find_delta_ids([1, 9, 3], [1, 2])
