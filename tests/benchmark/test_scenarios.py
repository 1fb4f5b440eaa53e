"""Conversations of benchmarks."""

from dataclasses import replace

import pytest

from server_ext.benchmark.scenarios import Scenario, find_continuation, growing, stepping
from server_ext.traffic import PlannedSession, PlannedTurn, prompts


def scenario(*sessions: PlannedSession) -> Scenario:
    """A scenario of given sessions."""
    return Scenario(name="made", what="", plan=lambda _: sessions, arms=("no_reuse",))


AGENTS = Scenario(
    name="agents",
    what="",
    plan=growing([200, 300], num_turns=3, delta_tokens=(4, 8), output_tokens=1),
    arms=("no_reuse",),
    turns_beside=(3,),
    num_beside=2,
)


def num_words(text: str) -> int:
    """How many words a text has."""
    return len(text.split())


def test_a_round_is_the_same_for_every_arm_and_every_process():
    """Seed and number say all about a round; another number is another round."""
    first, again, other = (AGENTS.scripts(number, seed=1) for number in (0, 0, 1))
    assert first == again
    assert first != other
    assert first != AGENTS.scripts(0, seed=2)


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


def test_an_agent_is_brought_to_one_length_after_the_other():
    """Its prompt has each length once, and short turns follow; those that only lengthen it are not measured."""
    plan = stepping([200, 300], turns_at_each=[2, 1], delta_tokens=(5, 9), output_tokens=3)
    (session,) = plan(7)
    assert [prompt for prompt, _ in prompts(session)][::3] == [200, 300]
    (script,) = replace(AGENTS, plan=plan, max_delta=20, turns_beside=(), num_beside=0).scripts(0, seed=0)
    assert [ask.is_measured for ask in script.asks] == [True, True, True, False, True]


def test_a_length_that_the_history_has_outgrown_is_refused():
    """A turn cannot add fewer than no tokens."""
    with pytest.raises(ValueError, match="208 tokens before it shall come to 200"):
        stepping([200, 200], turns_at_each=[1, 1], delta_tokens=(2, 2), output_tokens=3)(0)


def test_other_sessions_have_prompts_of_their_own_before_each_later_turn():
    """No two are alike, so that none finds another one's blocks, and all arms get the same."""
    pressed = replace(AGENTS, num_crowd=2, crowd_tokens=50)
    scripts = pressed.scripts(0, seed=1)
    crowd = [ids for script in scripts for ask in script.asks for ids in ask.crowd]
    assert [[len(ask.crowd) for ask in script.asks] for script in scripts] == [[0, 2, 2]] * 2
    assert {len(ids) for ids in crowd} == {50}
    assert len(set(crowd)) == len(crowd)
    assert scripts == pressed.scripts(0, seed=1)


def test_requests_beside_several_agents_are_refused():
    """Whose latency would it be? The error says what to set."""
    with pytest.raises(ValueError, match="at_once=1, got 2"):
        replace(AGENTS, at_once=2)


@pytest.mark.parametrize(
    ("prompt", "before", "answer", "num_dropped", "new"),
    [
        ([1, 2, 3, 4], [1], [2], 0, [3, 4]),
        ([1, 2], [], [], 0, [1, 2]),
        ([1, 2, 7, 8], [1], [2, 3, 9], 2, [7, 8]),
        ([1, 7, 8], [1], [2, 3], 2, [7, 8]),
        ([1, 2], [1], [2, 3], 1, []),
    ],
)
def test_a_turn_continues_the_one_before_it(prompt, before, answer, num_dropped, new):
    """Its prompt is the history, less what of the answer does not stay, and what is new behind it."""
    found = find_continuation(prompt, before, answer)
    assert (found.num_dropped, found.token_ids) == (num_dropped, new)
    assert found.prompt([*before, *answer]) == prompt


def test_a_turn_that_rewrites_the_prompt_before_it_is_refused():
    """Such a history is another conversation; the error says where it differs."""
    with pytest.raises(ValueError, match="at token 1 of 2"):
        find_continuation([1, 9, 3], [1, 2], [3])
