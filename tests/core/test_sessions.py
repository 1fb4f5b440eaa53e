"""What was said is kept by turns, within bounds, and one turn at a time."""

from array import array

import pytest

from server_ext.core.errors import CapacityExceeded, SessionNotFound, TurnConflict
from server_ext.core.sessions import SessionTable

from .fakes import ALICE, BOB, make_settings

# One record without texts is counted as this.
EMPTY_BYTES = 1024


def make_sessions(**changes):
    """Return a table, and the list of keys that it drops."""
    dropped = []
    return SessionTable(make_settings(**changes), on_drop=lambda key, now_s: dropped.append(key)), dropped


def open_session(sessions, key=ALICE, *, chunk=b"", turn=0, replace=False, now_s=0.0):
    """Open a session."""
    return sessions.open(key, chunk, turn=turn, replace=replace, now_s=now_s)


def run_turn(sessions, key=ALICE, *, turn, nonce="n", idempotency_key="", reply=b"r", chunk=b"c", now_s=0.0):
    """Run one whole turn."""
    assert sessions.start_turn(key, turn, idempotency_key, nonce, now_s=now_s) is None
    return sessions.complete_turn(nonce, array("i", [1, 2, 3]), chunk, reply, now_s=now_s)


def verify_conflict(call, *, expected_turn=None, retry_after_s=None):
    """Verify that a call is a conflict with these extra fields."""
    with pytest.raises(TurnConflict) as caught:
        call()
    assert (caught.value.info.expected_turn, caught.value.info.retry_after_s) == (expected_turn, retry_after_s)


# ---------------------------------------------------------------- open


def test_a_new_session_is_empty():
    """A session opened without history has no turns and no ids."""
    session = open_session(make_sessions()[0], chunk=b"system")
    assert (session.turn, session.transcript, len(session.token_ids)) == (0, [b"system"], 0)
    assert not session.is_reopened


def test_a_session_opened_with_turns_is_reopened():
    """A session whose turns were completed elsewhere says so until its next turn is complete."""
    sessions, _ = make_sessions()
    assert open_session(sessions, chunk=b"history", turn=3).is_reopened
    assert not run_turn(sessions, turn=4).is_reopened


def test_opening_again_returns_the_session_as_it_is():
    """Opening is idempotent: with the same number of turns nothing is overwritten."""
    sessions, _ = make_sessions()
    first = open_session(sessions, chunk=b"one")
    assert open_session(sessions, chunk=b"two") is first
    assert first.transcript == [b"one"]


def test_opening_with_another_number_of_turns_is_a_conflict():
    """A caller with another view of the history is told the turn that fits."""
    sessions, _ = make_sessions()
    open_session(sessions, turn=3)
    verify_conflict(lambda: open_session(sessions, turn=2), expected_turn=4)


@pytest.mark.parametrize("turn", [1, 3])
def test_replace_swaps_the_transcript(turn):
    """With `replace` the history is the given one; the old one is kept, without ids, until the next turn is done."""
    sessions, dropped = make_sessions()
    open_session(sessions, chunk=b"x" * 1000)
    run_turn(sessions, turn=1, idempotency_key="k")
    session = open_session(sessions, chunk=b"short", turn=turn, replace=True)
    assert (session.turn, session.transcript, session.last_reply) == (turn, [b"short"], None)
    assert len(session.token_ids) == 0
    assert not session.is_reopened
    assert session.replaced == [b"x" * 1000, b"c"]
    assert sessions.num_bytes == EMPTY_BYTES + 5 + 1001
    assert open_session(sessions, chunk=b"other", turn=turn, replace=True).replaced == session.replaced
    assert run_turn(sessions, turn=turn + 1).replaced == []
    assert sessions.num_bytes == EMPTY_BYTES + 5 + 1 + 12
    assert (len(sessions), dropped) == (1, [])


def test_a_replaced_history_that_nothing_was_computed_from_is_not_kept():
    """Without a completed turn there is nothing that the next one could be compared with."""
    sessions, _ = make_sessions()
    open_session(sessions, chunk=b"x", turn=1)
    assert open_session(sessions, chunk=b"y", turn=1, replace=True).replaced == []


def test_a_reopened_session_that_is_replaced_is_still_reopened():
    """Swapping the transcript does not hide that nothing was ever held here."""
    sessions, _ = make_sessions()
    open_session(sessions, turn=3)
    assert open_session(sessions, turn=2, replace=True).is_reopened


def test_replace_opens_what_is_unknown():
    """Replacing a session that is not there opens it."""
    assert open_session(make_sessions()[0], turn=2, replace=True).is_reopened


def test_a_running_session_is_not_replaced():
    """While a turn runs its history stays; opening it as it is does no harm."""
    sessions, _ = make_sessions()
    open_session(sessions)
    sessions.start_turn(ALICE, 1, "", "n", now_s=0)
    verify_conflict(lambda: open_session(sessions, replace=True), retry_after_s=0.2)
    assert open_session(sessions).open_turn is not None


def test_an_unknown_session_is_not_found():
    """An unknown id is an error that says what to do; another tenant's id is just as unknown."""
    sessions, _ = make_sessions()
    open_session(sessions)
    for key in (("tenant-b", "alice"), BOB):
        assert sessions.get(key) is None
        with pytest.raises(SessionNotFound, match=f"'{key[1]}' is not known here: open it again"):
            sessions.require(key, now_s=0)


# ---------------------------------------------------------------- turns


def test_a_completed_turn_is_appended():
    """A turn adds its chunk, its ids and its reply, and counts."""
    sessions, _ = make_sessions()
    open_session(sessions, chunk=b"open")
    run_turn(sessions, turn=1, idempotency_key="k1", reply=b"one", chunk=b"c1")
    session = run_turn(sessions, turn=2, idempotency_key="k2", reply=b"two", chunk=b"c2")
    assert (session.turn, session.transcript) == (2, [b"open", b"c1", b"c2"])
    assert (session.last_reply, list(session.token_ids)) == (("k2", b"two"), [1, 2, 3])
    assert sessions.num_bytes == EMPTY_BYTES + len(b"openc1c2two") + 12


def test_one_turn_at_a_time():
    """While a turn runs, another one is told to wait, whatever its number."""
    sessions, _ = make_sessions()
    open_session(sessions)
    sessions.start_turn(ALICE, 1, "k", "n", now_s=0)
    for turn in (1, 2):
        verify_conflict(lambda turn=turn: sessions.start_turn(ALICE, turn, "k", "m", now_s=0), retry_after_s=0.2)


@pytest.mark.parametrize("turn", [0, 1, 3])
def test_a_number_that_does_not_fit_is_a_conflict(turn):
    """An old number with another key, or one that skips a turn, is told the number that fits."""
    sessions, _ = make_sessions()
    open_session(sessions)
    run_turn(sessions, turn=1, idempotency_key="k")
    verify_conflict(lambda: sessions.start_turn(ALICE, turn, "other", "m", now_s=0), expected_turn=2)


def test_a_repetition_gets_the_stored_reply():
    """The last turn's number with its key returns the reply, even while the next turn runs."""
    sessions, _ = make_sessions()
    open_session(sessions)
    run_turn(sessions, turn=1, idempotency_key="k", reply=b"hello")
    assert sessions.start_turn(ALICE, 1, "k", "m", now_s=0) == b"hello"
    sessions.start_turn(ALICE, 2, "k2", "m", now_s=0)
    assert sessions.check_turn(ALICE, 1, "k", now_s=0) == b"hello"


def test_without_a_key_nothing_repeats():
    """Two calls without an idempotency key are two turns, not one and its repetition."""
    sessions, _ = make_sessions()
    open_session(sessions)
    run_turn(sessions, turn=1, idempotency_key="")
    verify_conflict(lambda: sessions.start_turn(ALICE, 1, "", "m", now_s=0), expected_turn=2)


def test_a_cancelled_turn_leaves_no_trace():
    """A cancelled turn can be tried again under its number; cancelling is idempotent."""
    sessions, _ = make_sessions()
    open_session(sessions)
    sessions.start_turn(ALICE, 1, "k", "n", now_s=0)
    assert sessions.cancel_turn("n", now_s=0)
    assert not sessions.cancel_turn("n", now_s=0)
    assert run_turn(sessions, turn=1).turn == 1


def test_a_turn_that_took_too_long_is_given_up():
    """After the timeout the next call takes over, and the late end of the old turn is refused."""
    sessions, _ = make_sessions(turn_timeout_s=10)
    open_session(sessions)
    sessions.start_turn(ALICE, 1, "k", "old", now_s=0)
    verify_conflict(lambda: sessions.start_turn(ALICE, 1, "k", "new", now_s=9.9), retry_after_s=0.2)
    assert sessions.start_turn(ALICE, 1, "k", "new", now_s=10) is None
    verify_conflict(lambda: sessions.complete_turn("old", array("i"), b"", b"", now_s=10), retry_after_s=0.2)
    assert sessions.complete_turn("new", array("i"), b"", b"", now_s=19).turn == 1


# ---------------------------------------------------------------- forks and rewinds


def converse(sessions, *, num_turns=3, key=ALICE):
    """Run turns whose ids each continue the ones before: [0, 1], [0, 1, 2, 3] and so on."""
    open_session(sessions, key, chunk=b"opened")
    for turn in range(1, num_turns + 1):
        assert sessions.start_turn(key, turn, f"k{turn}", "n", now_s=0) is None
        sessions.complete_turn("n", array("i", range(2 * turn)), b"turn %d" % turn, b"reply", now_s=0)


CHILD = (ALICE[0], "child")


@pytest.mark.parametrize(("at_turn", "turn"), [(None, 3), (3, 3), (2, 2), (1, 1), (0, 0)])
def test_a_fork_has_the_history_up_to_its_turn(at_turn, turn):
    """The child has the parent's chunks and ids of then, goes on by itself, and leaves the parent as it was."""
    sessions, _ = make_sessions()
    converse(sessions)
    child, is_new = sessions.fork(ALICE, CHILD, at_turn, now_s=0)
    assert is_new
    assert (child.turn, list(child.token_ids)) == (turn, list(range(2 * turn)))
    assert child.transcript == [b"opened", b"turn 1", b"turn 2", b"turn 3"][: turn + 1]
    assert child.origin == ("alice", turn)
    assert run_turn(sessions, CHILD, turn=turn + 1, nonce="m").turn == turn + 1
    parent = sessions.get(ALICE)
    assert (parent.turn, list(parent.token_ids), len(parent.transcript)) == (3, list(range(6)), 4)
    assert parent.last_reply == ("k3", b"reply")


def test_forking_again_returns_the_child_as_it_is():
    """A retry finds what the first call made, also when parent or child have gone on, or the parent is gone."""
    sessions, _ = make_sessions()
    converse(sessions)
    child, _ = sessions.fork(ALICE, CHILD, None, now_s=0)
    run_turn(sessions, CHILD, turn=4)
    run_turn(sessions, ALICE, turn=4)
    assert sessions.fork(ALICE, CHILD, None, now_s=0) == (child, False)
    assert sessions.fork(ALICE, CHILD, 3, now_s=0) == (child, False)
    verify_conflict(lambda: sessions.fork(ALICE, CHILD, 2, now_s=0), expected_turn=5)
    sessions.end(ALICE, now_s=0)
    assert sessions.fork(ALICE, CHILD, 3, now_s=0) == (child, False)


def test_a_taken_id_is_not_forked_onto():
    """A session that is no fork of this parent stays what it is."""
    sessions, _ = make_sessions()
    converse(sessions)
    open_session(sessions, CHILD, turn=7)
    verify_conflict(lambda: sessions.fork(ALICE, CHILD, None, now_s=0), expected_turn=8)
    sessions.fork(ALICE, (ALICE[0], "other"), None, now_s=0)
    verify_conflict(lambda: sessions.fork(CHILD, (ALICE[0], "other"), None, now_s=0), expected_turn=4)


@pytest.mark.parametrize("verb", ["fork", "rewind"])
def test_turns_that_are_not_known_cannot_be_gone_back_to(verb):
    """Turns still to come, and those that a reopened session had before, are refused with the number that fits."""
    sessions, _ = make_sessions()
    open_session(sessions, turn=3)
    run_turn(sessions, turn=4)

    def go_back(turn):
        return sessions.rewind(ALICE, turn, now_s=0) if verb == "rewind" else sessions.fork(ALICE, CHILD, turn, now_s=0)

    for turn in (5, 2, 0):
        verify_conflict(lambda turn=turn: go_back(turn), expected_turn=5)
    go_back(3)


@pytest.mark.parametrize("verb", ["fork", "rewind"])
def test_a_running_session_is_neither_forked_nor_rewound(verb):
    """Between the turns only; the caller is told to wait."""
    sessions, _ = make_sessions()
    converse(sessions)
    sessions.start_turn(ALICE, 4, "k", "n", now_s=0)
    go_back = {
        "rewind": lambda: sessions.rewind(ALICE, 1, now_s=0),
        "fork": lambda: sessions.fork(ALICE, CHILD, 1, now_s=0),
    }[verb]
    verify_conflict(go_back, retry_after_s=0.2)
    with pytest.raises(SessionNotFound):
        sessions.rewind(BOB, 0, now_s=0)
    with pytest.raises(SessionNotFound):
        sessions.fork(BOB, CHILD, 0, now_s=0)


def test_a_rewound_session_goes_on_from_there():
    """Rewinding forgets what came behind, last reply included; rewinding to the end is nothing, and so is a retry."""
    sessions, _ = make_sessions()
    converse(sessions)
    assert sessions.rewind(ALICE, 3, now_s=0).last_reply is not None
    for _ in range(2):
        session = sessions.rewind(ALICE, 1, now_s=0)
        assert (session.turn, list(session.token_ids)) == (1, [0, 1])
        assert (session.transcript, session.last_reply) == ([b"opened", b"turn 1"], None)
    assert sessions.num_bytes == EMPTY_BYTES + len(b"openedturn 1") + 8
    verify_conflict(lambda: run_turn(sessions, turn=4), expected_turn=2)
    assert run_turn(sessions, turn=2).turn == 2


def test_what_a_template_rewrote_has_no_ids_any_more():
    """Where a turn's ids do not begin with those before, the turns that they lack are known by their texts only."""
    sessions, _ = make_sessions()
    converse(sessions)
    sessions.start_turn(ALICE, 4, "", "n", now_s=0)
    session = sessions.complete_turn("n", array("i", [0, 1, 2, 99]), b"turn 4", b"", now_s=0)
    assert session.id_counts == [0, 2, 0, 0, 4]
    child, _ = sessions.fork(ALICE, CHILD, 2, now_s=0)
    assert (child.turn, len(child.token_ids), len(child.transcript)) == (2, 0, 3)


def test_a_turn_may_continue_an_earlier_one():
    """What the turn does not continue goes when it is complete, and stays when it is cancelled."""
    sessions, _ = make_sessions()
    converse(sessions)
    for nonce in ("cancelled", "completed"):
        sessions.start_turn(ALICE, 4, "", nonce, now_s=0, num_kept=2)
        assert len(sessions.get(ALICE).transcript) == 4
        if nonce == "cancelled":
            sessions.cancel_turn(nonce, now_s=0)
    session = sessions.complete_turn("completed", array("i", [0, 1, 5]), b"other", b"reply", now_s=0)
    assert (session.turn, session.transcript) == (2, [b"opened", b"turn 1", b"other"])
    assert (session.id_counts, session.last_reply) == ([0, 2, 3], None)
    assert sessions.num_bytes == session.counted_bytes()


def test_a_turn_may_begin_all_over():
    """A turn that continues nothing is the first one, whatever the session was opened with."""
    sessions, _ = make_sessions()
    open_session(sessions, chunk=b"history", turn=7)
    sessions.start_turn(ALICE, 8, "", "n", now_s=0, num_kept=0)
    session = sessions.complete_turn("n", array("i", [5]), b"all", b"", now_s=0)
    assert (session.turn, session.first_turn, session.transcript) == (1, 0, [b"", b"all"])


def test_tables_that_begin_elsewhere_share_no_revision():
    """So that no history of a home passes for one of the home before."""
    one, two = (SessionTable(make_settings(), on_drop=lambda key, now_s: None, first_revision=n) for n in (0, 1 << 40))
    for sessions in (one, two):
        converse(sessions)
    assert one.get(ALICE).revision != two.get(ALICE).revision


def test_a_turn_rendered_from_a_history_of_before_does_not_start():
    """Whatever changed the history meanwhile, the caller must load it again."""
    sessions, _ = make_sessions()
    converse(sessions)
    revision = sessions.get(ALICE).revision
    sessions.rewind(ALICE, 2, now_s=0)
    run_turn(sessions, turn=3)
    start = {"now_s": 0, "num_kept": 1}
    verify_conflict(lambda: sessions.start_turn(ALICE, 4, "", "m", revision=revision, **start), retry_after_s=0.2)
    revision = sessions.get(ALICE).revision
    assert sessions.start_turn(ALICE, 4, "", "m", revision=revision, **start) is None


def test_a_fork_is_bounded_like_any_session():
    """A child needs room; its parent is never what makes it."""
    sessions, dropped = make_sessions(max_sessions=2)
    converse(sessions)
    open_session(sessions, BOB, now_s=1)
    sessions.fork(ALICE, CHILD, 1, now_s=2)
    assert dropped == [BOB]
    sessions.start_turn(CHILD, 2, "k", "n", now_s=2)
    with pytest.raises(CapacityExceeded):
        sessions.fork(ALICE, (ALICE[0], "second"), None, now_s=2)


# ---------------------------------------------------------------- the end, and bounds


def test_an_ended_session_is_gone():
    """Ending drops a session, running or not, with its open turn; ending again is nothing."""
    sessions, dropped = make_sessions()
    for is_running in (False, True):
        open_session(sessions)
        if is_running:
            sessions.start_turn(ALICE, 1, "k", "n", now_s=0)
        assert sessions.end(ALICE, now_s=0)
        assert not sessions.end(ALICE, now_s=0)
        assert not sessions.cancel_turn("n", now_s=0)
    assert (len(sessions), sessions.num_bytes, dropped) == (0, 0, [ALICE, ALICE])


def test_an_unused_session_is_dropped_after_its_retention():
    """Retention counts from the last use; looking without using does not prolong it."""
    sessions, dropped = make_sessions(session_retention_s=1000)
    open_session(sessions)
    open_session(sessions, BOB, now_s=1)
    sessions.require(ALICE, now_s=500)
    sessions.get(BOB)
    assert sessions.sweep(now_s=1000.9) == 0
    assert sessions.sweep(now_s=1001) == 1
    assert dropped == [BOB]
    assert sessions.sweep(now_s=1500) == 1


def test_a_running_session_is_never_dropped():
    """A turn keeps its session, however long ago it was used, until the turn itself times out."""
    sessions, dropped = make_sessions(session_retention_s=1000, turn_timeout_s=5000)
    open_session(sessions)
    sessions.start_turn(ALICE, 1, "k", "n", now_s=0)
    assert sessions.sweep(now_s=4999) == 0
    assert sessions.sweep(now_s=5000) == 1
    assert dropped == []
    assert sessions.sweep(now_s=6000) == 1


def test_all_sessions_can_be_listed():
    """Iteration yields running and idle sessions, each once."""
    sessions, _ = make_sessions()
    open_session(sessions)
    open_session(sessions, BOB)
    sessions.start_turn(BOB, 1, "k", "n", now_s=0)
    assert [session.key for session in sessions] == [BOB, ALICE]


def test_the_session_that_was_idle_longest_makes_room():
    """At the most sessions, a new one drops the least recently used."""
    sessions, dropped = make_sessions(max_sessions=3)
    for i in range(3):
        open_session(sessions, ("t", str(i)), now_s=i)
    sessions.require(("t", "0"), now_s=3)
    open_session(sessions, ("t", "3"), now_s=4)
    assert dropped == [("t", "1")]
    assert len(sessions) == 3


def test_bytes_are_bounded_too():
    """A large new session drops as many idle ones as it needs, and no more."""
    sessions, dropped = make_sessions(max_session_bytes=4 * EMPTY_BYTES)
    for i in range(4):
        open_session(sessions, ("t", str(i)), now_s=i)
    open_session(sessions, ("t", "4"), chunk=b"x" * EMPTY_BYTES, now_s=4)
    assert dropped == [("t", "0"), ("t", "1")]
    assert sessions.num_bytes == 4 * EMPTY_BYTES


@pytest.mark.parametrize("limit", [{"max_sessions": 2}, {"max_session_bytes": 2 * EMPTY_BYTES + 1}])
def test_what_cannot_fit_is_refused_and_drops_nobody(limit):
    """Where even dropping all idle sessions makes no room, nothing is dropped and the caller is told to wait."""
    sessions, dropped = make_sessions(**limit)
    for key in (ALICE, BOB):
        open_session(sessions, key)
    sessions.start_turn(ALICE, 1, "k", "n", now_s=0)
    sessions.start_turn(BOB, 1, "k", "m", now_s=0)
    with pytest.raises(CapacityExceeded, match="no room for session 'carol'") as caught:
        open_session(sessions, ("t", "carol"))
    assert caught.value.info.retry_after_s == 5
    sessions.cancel_turn("n", now_s=0)
    if "max_session_bytes" in limit:
        with pytest.raises(CapacityExceeded):
            open_session(sessions, ("t", "carol"), chunk=b"x" * 2 * EMPTY_BYTES)
    assert dropped == []
    open_session(sessions, ("t", "carol"))
    assert dropped == [ALICE]


def test_a_replacement_is_measured_against_what_it_replaces():
    """Replacing a session needs room for the difference only, and never drops the session itself."""
    sessions, dropped = make_sessions(max_session_bytes=3 * EMPTY_BYTES)
    open_session(sessions, ALICE, chunk=b"x" * 1000, now_s=0)
    open_session(sessions, BOB, now_s=1)
    open_session(sessions, ALICE, chunk=b"x" * 1024, replace=True, now_s=2)
    assert dropped == []
    open_session(sessions, ALICE, chunk=b"x" * 1025, replace=True, now_s=3)
    assert dropped == [BOB]
    with pytest.raises(CapacityExceeded):
        open_session(sessions, ALICE, chunk=b"x" * 4096, replace=True, now_s=4)
    assert sessions.get(ALICE).transcript == [b"x" * 1025]


def test_a_finished_turn_is_kept_even_over_the_limit():
    """Work that is done is not thrown away: idle sessions go, and then the limit waits for the next start."""
    sessions, dropped = make_sessions(max_session_bytes=3 * EMPTY_BYTES)
    for key in (ALICE, BOB):
        open_session(sessions, key)
    sessions.start_turn(ALICE, 1, "k", "n", now_s=0)
    session = sessions.complete_turn("n", array("i"), b"x" * 4 * EMPTY_BYTES, b"", now_s=1)
    assert (session.turn, dropped) == (1, [BOB])
    assert sessions.num_bytes > 3 * EMPTY_BYTES
    with pytest.raises(CapacityExceeded):
        sessions.start_turn(ALICE, 2, "k", "m", now_s=2)
    assert sessions.get(ALICE).open_turn is None


def test_starting_over_the_limit_drops_idle_sessions_first():
    """A start brings the store back under its limit where dropping others can."""
    sessions, dropped = make_sessions(max_session_bytes=3 * EMPTY_BYTES)
    for key in (ALICE, BOB):
        open_session(sessions, key)
        sessions.start_turn(key, 1, "k", str(key), now_s=0)
    for key in (ALICE, BOB):
        sessions.complete_turn(str(key), array("i"), b"x" * EMPTY_BYTES, b"", now_s=1)
    assert dropped == [ALICE]
    assert sessions.start_turn(BOB, 2, "k", "m", now_s=2) is None
