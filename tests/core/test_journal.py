"""The log of what becomes of leases."""

import logging
from array import array

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


def test_what_becomes_of_a_pin_is_logged_too(lines):
    """A turn that has ended and is not settled yet loses blocks to requests as leases do, and an operator sees it."""
    pool, name = FakePool(16), short_name(ALICE)
    table = make_table(pool, provisional_ttl_s=5)

    def end_request(nonce, now_s):
        table.begin(ALICE, some_ids(16), "m", now_s=now_s, want_ticket=False, nonce=nonce)
        block_ids = pool.take(4)
        table.finish(nonce, block_ids, 16, some_ids(16), now_s=now_s)
        pool.give_back(block_ids)
        assert lines() == []

    end_request("clipped", 0)
    table.revoke(1, now_s=0)
    assert lines() == [("INFO", f"Lease {name}: clip pin, 3 blocks (lease_revoked)")]
    table.revoke(3, now_s=0)
    assert lines() == [("INFO", f"Lease {name}: drop pin, 3 blocks (lease_revoked)")]
    table.abandon("clipped", return_ticket=True, now_s=0)
    assert lines() == []
    end_request("late", 1)
    table.sweep(now_s=6)
    assert lines() == [("INFO", f"Lease {name}: drop pin, 4 blocks (lease_expired)")]
    table.abandon("late", return_ticket=True, now_s=6)
    end_request("abandoned", 7)
    table.abandon("abandoned", return_ticket=True, now_s=7)
    assert lines() == [("INFO", f"Lease {name}: drop pin, 4 blocks")]
    end_request("reset", 8)
    table.release_all("reset", now_s=8)
    assert lines() == [("INFO", f"Lease {name}: drop pin, 4 blocks (reset)")]


def test_forks_rewinds_and_regained_leases_are_for_debugging(lines):
    """What a session does by itself is no news to an operator."""
    pool, name = FakePool(16), short_name(ALICE)
    table = make_table(pool)
    run_turn(table, pool, ALICE, some_ids(16), now_s=0, nonce="a", ttl_s=10)
    lines()
    child = (ALICE[0], "child")
    table.fork(ALICE, child, array("i", some_ids(8)), ttl_s=None, now_s=1)
    assert lines() == [("DEBUG", f"Lease {short_name(child)}: fork, 2 blocks")]
    table.rewind(ALICE, array("i", some_ids(12)), now_s=2)
    assert lines() == [("DEBUG", f"Lease {name}: rewind, 3 blocks")]
    table.release(child, now_s=2)
    table.sweep(now_s=11)
    lines()
    table.begin(ALICE, some_ids(16), "model-1", now_s=12, want_ticket=True, nonce="b")
    assert lines() == [("DEBUG", f"Lease {name}: regain, 3 blocks (lease_expired)")]


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
