"""The log of what becomes of leases."""

import logging

import pytest

from server_ext.core.journal import short_name

from .fakes import ALICE, BOB, FakePool, make_table, run_turn, some_ids


@pytest.fixture
def lines(caplog):
    """Return a function that takes what was logged since its last call, as (level, transition, rest)."""
    caplog.set_level(logging.DEBUG, logger="vllm.bidikv.leases")

    def take():
        logged = [(record.levelname, record.getMessage()) for record in caplog.records]
        caplog.clear()
        return logged

    return take


def test_every_transition_is_one_line(lines):
    """Grants and what every turn does are for debugging; what shortens or ends a lease is for operators."""
    pool, name = FakePool(16), short_name(ALICE)
    table = make_table(pool, budget_fraction=0.5)
    run_turn(table, pool, ALICE, some_ids(8), now_s=0, nonce="a")
    assert lines() == [("DEBUG", f"Lease {name}: grant, 2 blocks")]
    run_turn(table, pool, ALICE, some_ids(12), now_s=1, nonce="b")
    assert lines() == [
        ("DEBUG", f"Lease {name}: renew, 2 blocks"),
        ("DEBUG", f"Lease {name}: supersede, 2 blocks"),
        ("DEBUG", f"Lease {name}: grant, 3 blocks"),
    ]
    table.revoke(1, now_s=1)
    assert lines() == [("INFO", f"Lease {name}: clip, 2 blocks (lease_revoked)")]
    table.revoke(9, now_s=1)
    assert lines() == [("INFO", f"Lease {name}: revoke, 2 blocks (lease_revoked)")]
    run_turn(table, pool, ALICE, some_ids(40), now_s=2, nonce="c")
    assert lines() == [
        ("INFO", f"Lease {name}: clip, 8 blocks (over_budget)"),
        ("DEBUG", f"Lease {name}: grant, 8 blocks (over_budget)"),
    ]
    run_turn(table, pool, BOB, some_ids(4, seed=1), now_s=2, nonce="d")
    assert lines() == [("INFO", f"Lease {short_name(BOB)}: reject, 0 blocks (over_budget)")]
    table.release(ALICE, now_s=3)
    assert lines() == [("INFO", f"Lease {name}: release, 8 blocks (released)")]
    run_turn(table, pool, ALICE, some_ids(4), now_s=4, nonce="e")
    table.release_all("reset", now_s=4)
    assert lines()[-1] == ("INFO", f"Lease {name}: reset, 1 blocks (reset)")
    run_turn(table, pool, ALICE, some_ids(4), now_s=5, nonce="f")
    table.sweep(now_s=500)
    assert lines()[-1] == ("INFO", f"Lease {name}: expire, 1 blocks (lease_expired)")


def test_lines_name_nothing_that_a_client_chose(lines):
    """Neither the tenant nor the session id is logged, and the same session has the same name in every line."""
    pool = FakePool(16)
    table = make_table(pool)
    key = ("secret-tenant", "secret-session")
    run_turn(table, pool, key, some_ids(8), now_s=0, nonce="a")
    table.release(key, now_s=1)
    logged = lines()
    assert len({message.split(":")[0] for _, message in logged}) == 1
    assert not any("secret" in message for _, message in logged)


def test_any_text_can_be_a_session_id(lines):
    """A lone surrogate in an id, which is no Unicode text, is no reason to fail."""
    assert len(short_name(("t", "\ud800"))) == 8


def test_what_is_not_logged_costs_no_hash(monkeypatch):
    """With the level above, no session name is computed."""
    monkeypatch.setattr("server_ext.core.journal.short_name", None)
    logging.getLogger("vllm.bidikv.leases").setLevel(logging.WARNING)
    pool = FakePool(16)
    run_turn(make_table(pool), pool, ALICE, some_ids(8), now_s=0, nonce="a")
    logging.getLogger("vllm.bidikv.leases").setLevel(logging.NOTSET)
