"""Who makes room for whom, when the session store is full."""

from array import array
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server_ext.core.errors import CapacityExceeded
from server_ext.core.sessions import SessionTable

from .fakes import make_settings

RECORD_BYTES = 1024
MAX_SESSIONS = 8


def make_sessions(**limits):
    """Return a session table, and the list of keys that it drops."""
    dropped = []
    limits = {"max_sessions": MAX_SESSIONS} | limits
    return SessionTable(make_settings(**limits), on_drop=lambda key, _: dropped.append(key)), dropped


def open_all(sessions, *names, now_s=0.0, num_bytes=0):
    """Open sessions; a name's first letter is its tenant."""
    for name in names:
        sessions.open((name[0], name), b"x" * num_bytes, turn=0, replace=False, now_s=now_s)


def test_the_tenant_that_has_most_makes_room():
    """A flood of one tenant's sessions drops its own, not those that others have used longer ago."""
    sessions, dropped = make_sessions()
    open_all(sessions, "a1", "a2")
    open_all(sessions, *(f"b{i}" for i in range(10)), now_s=1)
    assert dropped == [("b", "b0"), ("b", "b1"), ("b", "b2"), ("b", "b3")]
    open_all(sessions, "a3", "c1", now_s=2)
    assert dropped[4:] == [("b", "b4"), ("b", "b5")]


def test_a_tenant_at_its_share_makes_room_for_itself():
    """Of two that have as much, the one that asks for more gives."""
    sessions, dropped = make_sessions()
    open_all(sessions, "a1", "a2", "a3", "a4", "b1", "b2", "b3", "b4")
    open_all(sessions, "b5", now_s=1)
    open_all(sessions, "a5", now_s=2)
    assert dropped == [("b", "b1"), ("a", "a1")]


def test_among_equals_the_longest_idle_goes():
    """A newcomer's room comes from the tenants that have most, in the order of last use."""
    sessions, dropped = make_sessions(max_sessions=4)
    open_all(sessions, "a1", "b1", now_s=0)
    open_all(sessions, "b2", "a2", now_s=1)
    sessions.require(("a", "a1"), now_s=2)
    open_all(sessions, "c1", now_s=3)
    assert dropped == [("b", "b1")]


def test_what_counts_is_what_is_short():
    """Few large records make room for bytes, many small ones for records."""
    sessions, dropped = make_sessions(max_sessions=5, max_session_bytes=10 * RECORD_BYTES)
    open_all(sessions, "a1", num_bytes=5 * RECORD_BYTES)
    open_all(sessions, "b1", "b2", now_s=1)
    open_all(sessions, "c1", now_s=2, num_bytes=2 * RECORD_BYTES)
    assert dropped == [("a", "a1")]
    open_all(sessions, "a2", now_s=3, num_bytes=2 * RECORD_BYTES)
    open_all(sessions, "c2", now_s=4)
    assert dropped[1:] == []
    open_all(sessions, "d1", now_s=5)
    assert dropped[1:] == [("b", "b1")]


def test_running_sessions_count_but_are_not_dropped():
    """A tenant whose turns all run has much and cannot give; then the next one does, or there is no room."""
    sessions, dropped = make_sessions(max_sessions=4)
    open_all(sessions, "a1", "a2", "a3", "b1")
    for i in (1, 2, 3):
        sessions.start_turn(("a", f"a{i}"), 1, "", f"n{i}", now_s=0)
    open_all(sessions, "b2", now_s=1)
    assert dropped == [("b", "b1")]
    sessions.start_turn(("b", "b2"), 1, "", "n", now_s=1)
    with pytest.raises(CapacityExceeded):
        open_all(sessions, "c1", now_s=2)
    assert dropped == [("b", "b1")]
    sessions.complete_turn("n1", array("i", [1]), b"", b"", now_s=3)
    open_all(sessions, "c1", now_s=4)
    assert dropped == [("b", "b1"), ("a", "a1")]


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 9)), max_size=80))
def test_nobody_loses_a_session_to_a_tenant_that_has_more(opened):
    """Whatever is opened, the tenant of a dropped session had at least as many as every other with the new one."""
    sessions, dropped = make_sessions()
    for now_s, (tenant, number) in enumerate(opened):
        key = (tenant, f"{tenant}{number}")
        before = Counter(session.key[0] for session in sessions)
        before[tenant] += sessions.get(key) is None
        open_all(sessions, key[1], now_s=now_s)
        for dropped_tenant, _ in dropped:
            assert before[dropped_tenant] == max(before.values())
        dropped.clear()
        assert len(sessions) <= MAX_SESSIONS
        assert sessions.get(key) is not None
