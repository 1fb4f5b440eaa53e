"""How likely sessions return: priors, what is learned, and how little of it is kept."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server_ext.core.gaps import GapModel

from .fakes import ALICE, BOB

CAROL = ("tenant-a", "carol")
ENDINGS = st.sampled_from(["tool:bash", "tool:edit", "stop", "length"])


def run_gaps(model, key, ended_by, gaps_s, *, now_s=0.0):
    """Let a session's turns end, and begin again after these gaps; return when the last one began."""
    for gap_s in gaps_s:
        model.ended(key, ended_by, now_s=now_s)
        now_s += gap_s
        model.began(key, now_s=now_s)
    return now_s


def chance_after(model, key, ended_by, within_s):
    """Return the chance that a turn which ends now is followed by one within these seconds."""
    model.ended(key, ended_by, now_s=10_000)
    return model.return_chance(key, 10_000 + within_s, now_s=10_000)


@pytest.mark.parametrize(
    ("ended_by", "within_s", "share"),
    [
        ("tool:bash", 10, 0.54),
        ("tool:bash", 60, 0.88),
        ("tool:bash", 480, 0.99),
        ("stop", 60, 0.36),
        ("stop", 480, 0.74),
        ("stop", 1800, 0.90),
    ],
)
def test_what_nobody_knows_is_taken_from_recorded_agents(ended_by, within_s, share):
    """Of the sessions that return, the prior lets as many do so in time as recorded ones did, within a few per cent."""
    chance = chance_after(GapModel(), ALICE, ended_by, within_s)
    assert chance == pytest.approx(share * (0.99 if ended_by != "stop" else 0.9), abs=0.04)


def test_a_tool_is_known_by_its_name():
    """A tool that always takes minutes is learned as such, for every session, and says little of other tools."""
    model = GapModel()
    before = chance_after(model, BOB, "tool:build", 30)
    run_gaps(model, ALICE, "tool:build", [300.0] * 30)
    assert chance_after(model, BOB, "tool:build", 30) < before / 4
    assert chance_after(model, BOB, "tool:build", 900) > 0.8
    assert chance_after(model, BOB, "tool:edit", 30) > before / 2
    quick = GapModel()
    run_gaps(quick, ALICE, "tool:ls", [1.0] * 30)
    assert chance_after(quick, BOB, "tool:ls", 5) > 0.85


def test_a_session_has_habits_of_its_own():
    """One slow human is not taken for all: only that session's chance falls much."""
    model = GapModel()
    for index in range(20):
        run_gaps(model, ("t", f"other-{index}"), "stop", [60.0] * 5)
    run_gaps(model, ALICE, "stop", [3000.0] * 10)
    assert chance_after(model, ALICE, "stop", 300) < 0.5 * chance_after(model, BOB, "stop", 300)
    assert chance_after(model, ALICE, "tool:ls", 30) == chance_after(model, BOB, "tool:ls", 30)


def test_who_has_been_away_for_long_is_likely_gone():
    """The chance to return within the next minute falls with every minute of silence."""
    model = GapModel()
    model.ended(ALICE, "tool:bash", now_s=0)
    chances = [model.return_chance(ALICE, now_s + 60, now_s=now_s) for now_s in (0, 60, 600, 6000, 60_000)]
    assert chances == sorted(chances, reverse=True)
    assert chances[-1] < 0.05


def test_sessions_that_never_return_are_learned():
    """Where sessions are forgotten while they are away, a return grows less likely for others."""
    model = GapModel()
    before = chance_after(model, BOB, "stop", 3600)
    for index in range(50):
        model.ended(("t", str(index)), "stop", now_s=0)
        model.forget(("t", str(index)))
    assert chance_after(model, BOB, "stop", 3600) < before / 2


def test_forgetting_a_running_session_teaches_nothing():
    """A session that ends while its turn runs was not away."""
    model = GapModel()
    before = chance_after(model, BOB, "stop", 3600)
    model.ended(ALICE, "stop", now_s=0)
    model.began(ALICE, now_s=1)
    reference = GapModel()
    reference.ended(ALICE, "stop", now_s=0)
    reference.began(ALICE, now_s=1)
    model.forget(ALICE)
    model.forget(ALICE)
    assert chance_after(model, BOB, "stop", 3600) == chance_after(reference, BOB, "stop", 3600) != before


def test_a_turn_that_comes_to_nothing_counts_from_its_beginning():
    """After an abandoned turn the session was just seen, and the next beginning is no gap."""
    model = GapModel()
    model.ended(ALICE, "tool:bash", now_s=0)
    model.began(ALICE, now_s=100)
    assert model.return_chance(ALICE, 110, now_s=100) > 0.3
    learned = chance_after(model, BOB, "tool:bash", 10)
    model.began(ALICE, now_s=5000)
    assert chance_after(model, BOB, "tool:bash", 10) == learned


def test_an_unknown_session_teaches_nothing_and_is_average():
    """A first turn has no gap before it, and an unknown session's chance is that of any that stopped."""
    model = GapModel()
    model.began(ALICE, now_s=5)
    assert len(model) == 0
    model.ended(BOB, "stop", now_s=0)
    assert model.return_chance(ALICE, 60, now_s=0) == model.return_chance(BOB, 60, now_s=0)


def test_only_the_head_of_a_long_tool_name_counts():
    """A name is a client's text, and is kept no longer than a name needs to be."""
    model = GapModel()
    run_gaps(model, ALICE, "tool:" + "x" * 200, [300.0] * 30)
    cut = chance_after(model, BOB, "tool:" + "x" * 300, 30)
    assert cut == chance_after(model, BOB, "tool:" + "x" * 200, 30) < chance_after(model, BOB, "tool:x", 30)


def test_memory_is_bounded():
    """Neither sessions nor names of tools, which clients choose, make the model grow without end."""
    model = GapModel(max_sessions=10, max_endings=5)
    for index in range(100):
        run_gaps(model, ("t", str(index)), f"tool:{index}", [1.0])
    assert len(model) == 15


@given(
    events=st.lists(
        st.tuples(st.sampled_from([ALICE, BOB, CAROL]), ENDINGS, st.floats(0, 1e5), st.floats(0, 1e5), st.booleans())
    ),
    idle_s=st.floats(0, 1e6),
    within_s=st.floats(-10, 1e6),
    more_s=st.floats(0, 1e6),
)
def test_a_chance_is_a_chance(events, idle_s, within_s, more_s):
    """Whatever was seen: between 0 and 1, never less for a later deadline, and the same for the same events."""
    models = [GapModel(), GapModel()]
    for model in models:
        now_s = 0.0
        for key, ended_by, run_s, gap_s, is_forgotten in events:
            model.began(key, now_s=now_s)
            now_s += run_s
            model.ended(key, ended_by, now_s=now_s)
            now_s += gap_s
            if is_forgotten:
                model.forget(key)
        model.ended(ALICE, "tool:bash", now_s=now_s)
    now_s += idle_s
    chance, later, again = (
        model.return_chance(ALICE, now_s + within, now_s=now_s)
        for model, within in ((models[0], within_s), (models[0], within_s + more_s), (models[1], within_s))
    )
    assert 0 <= chance <= 1
    assert later >= chance - 1e-12
    assert chance == again
    assert within_s > 0 or chance == 0


def test_perfect_regularity_is_not_believed_for_ever():
    """However many gaps were equal, the next may be a little longer, and who is overdue has likely left."""
    model = GapModel()
    run_gaps(model, ALICE, "tool:cron", [60.0] * 25_000)
    model.ended(ALICE, "tool:cron", now_s=1e6)
    assert 0.99 < model.return_chance(ALICE, 1e6 + 90, now_s=1e6) < 1
    assert 0.5 < model.return_chance(ALICE, 1e6 + 61, now_s=1e6) < 0.75
    assert model.return_chance(ALICE, 1e6 + 900, now_s=1e6 + 90) < 1e-6
    assert math.isfinite(model.return_chance(ALICE, 3e6, now_s=2e6))
