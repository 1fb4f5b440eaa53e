"""Names, kinds and values of the metrics."""

import re
from collections import Counter

import pytest

from bidikv_sdk.wire import OUTCOMES
from server_ext.core import metrics
from server_ext.core.metrics import BlockSeconds, Counts

from .fakes import FakePool, make_home, packed, some_ids

KEY = {"tenant": "tenant-a", "session_id": "alice"}


def values(home, *, now_s):
    """Return a home's metrics as {(name, *label values): value}."""
    snapshot = home.handle("metrics", {}, now_s=now_s)["metrics"]
    return {(name, *labels): value for name, series in snapshot.items() for labels, value in series}


def run_turn(home, pool, *, turn, ids, now_s):
    """Run a turn with a ticket wanted, and leave it unsettled; return its nonce and ticket."""
    arg = {"turn": turn, "prompt_ids": packed(ids), "fingerprint": "m", "route": "fetch", "prefill_urls": ["http://p"]}
    begun = home.handle("begin", KEY | arg, now_s=now_s)
    block_ids = pool.take(-(-len(ids) // 4))
    home.leases.finish(begun["nonce"], block_ids, len(ids), ids, now_s=now_s)
    pool.give_back(block_ids)
    return begun


def settle(home, nonce, ids, *, now_s):
    """Settle a turn that keeps all its tokens."""
    arg = {"nonce": nonce, "num_tokens_kept": len(ids), "token_ids": packed(ids), "chunk": b"", "reply": b""}
    home.handle("settle", arg, now_s=now_s)


@pytest.mark.parametrize("metric", metrics.ALL, ids=lambda metric: metric.name)
def test_names_follow_the_rules_of_prometheus(metric):
    """Names are ours, counters end with `_total`, times are in seconds, and no label can hold a client's text."""
    assert re.fullmatch(r"bidikv_[a-z_]+[a-z]", metric.name)
    assert metric.name.endswith("_total") == (metric.kind == "counter")
    assert metric.help.endswith(".")
    assert set(metric.labels) <= {"state", "reason", "event", "holder", "outcome", "source"}
    assert all(len(known) == len(metric.labels) for known in metric.known)
    if metric.kind == "histogram":
        assert metric.name.endswith("_seconds")
        assert metric.known == tuple((outcome,) for outcome in OUTCOMES)


def test_names_are_unique():
    """No metric is defined twice."""
    assert max(Counter(metric.name for metric in metrics.ALL).values()) == 1


def test_a_new_home_shows_every_metric():
    """Before anything happened all of a home's metrics are there, with all known series, so that rates are right."""
    snapshot = make_home(FakePool()).handle("metrics", {}, now_s=0)["metrics"]
    assert set(snapshot) == {metric.name for metric in metrics.HOME}
    for metric in metrics.HOME:
        assert sorted(tuple(labels) for labels, _ in snapshot[metric.name]) == sorted(metric.known or ((),))


def test_a_turn_is_counted_at_every_step():
    """Gauges say what is, counters what was, and bytes follow blocks."""
    pool = FakePool()
    home = make_home(pool, block_bytes=1000)
    home.handle("open", KEY, now_s=0)
    settle(home, run_turn(home, pool, turn=1, ids=some_ids(16), now_s=0)["nonce"], some_ids(16), now_s=0)
    begun = run_turn(home, pool, turn=2, ids=some_ids(20), now_s=10)
    found = values(home, now_s=12)
    assert found["bidikv_leases", "idle"] == 0
    assert found["bidikv_leases", "running"] == found["bidikv_leases", "provisional"] == 1
    assert found["bidikv_blocks", "leased"] == found["bidikv_blocks", "ticketed"] == 4
    assert found["bidikv_bytes", "provisional"] == 5000
    assert found["bidikv_blocks", "free"] == 64 - 4 - 5
    assert found["bidikv_bytes", "total"] == 64_000
    assert found["bidikv_open_tickets",] == found["bidikv_tickets_total", "opened"] == 1
    assert found["bidikv_sessions", "running"] == 1
    assert found["bidikv_session_bytes",] > 0
    assert found["bidikv_pinned_byte_seconds_total", "lease"] == 4000 * 12
    assert found["bidikv_pinned_byte_seconds_total", "provisional"] == 5000 * 2
    assert found["bidikv_pinned_byte_seconds_total", "ticket"] == 4000 * 2
    home.handle("return_ticket", {"ticket_id": begun["ticket_id"], "read_age_s": 0.5}, now_s=12)
    settle(home, begun["nonce"], some_ids(20), now_s=12)
    found = values(home, now_s=12)
    assert found["bidikv_leases", "idle"] == found["bidikv_sessions", "idle"] == 1
    assert found["bidikv_lease_grants_total",] == 2
    assert found["bidikv_lease_renewals_total",] == found["bidikv_lease_supersedes_total",] == 1
    assert found["bidikv_tickets_total", "returned"] == 1
    assert found["bidikv_stale_reads_total",] == 0


def test_a_clipped_pin_counts_with_what_is_left():
    """What pressure takes from a finished turn before it is settled is no longer held."""
    pool = FakePool()
    home = make_home(pool)
    home.handle("open", KEY, now_s=0)
    begun = run_turn(home, pool, turn=1, ids=some_ids(16), now_s=0)
    home.leases.revoke(1, now_s=0)
    assert values(home, now_s=0)["bidikv_blocks", "provisional"] == 3
    home.handle("abandon", {"nonce": begun["nonce"], "return_ticket": True}, now_s=0)
    assert values(home, now_s=0)["bidikv_blocks", "provisional"] == 0


@pytest.mark.parametrize(
    ("drop", "reason"),
    [
        (lambda home, nonce: home.handle("abandon", {"nonce": nonce, "return_ticket": True}, now_s=1), "abandoned"),
        (lambda home, nonce: home.leases.sweep(now_s=6), "lease_expired"),
        (lambda home, nonce: home.leases.revoke(4, now_s=1), "lease_revoked"),
        (lambda home, nonce: home.leases.release_all("reset", now_s=1), "reset"),
        (lambda home, nonce: home.leases.release_all("model_changed", now_s=1), "model_changed"),
    ],
    ids=["client left", "late", "pressure", "reset", "new weights"],
)
def test_a_pin_that_is_dropped_is_counted_by_its_reason(drop, reason):
    """A client that leaves, a conductor that is late and a pool that is full are told apart."""
    pool = FakePool()
    home = make_home(pool)
    home.handle("open", KEY, now_s=0)
    begun = run_turn(home, pool, turn=1, ids=some_ids(16), now_s=0)
    drop(home, begun["nonce"])
    found = values(home, now_s=6)
    counted = {labels[0]: value for (name, *labels), value in found.items() if name == "bidikv_provisional_drops_total"}
    known = {"abandoned", "lease_expired", "lease_revoked", "reset", "model_changed"}
    assert counted == dict.fromkeys(known, 0) | {reason: 1}


def test_a_scrape_of_an_idle_engine_is_true():
    """Where no step and no call came by, the scrape itself ends what is due."""
    pool = FakePool()
    home = make_home(pool)
    home.handle("open", KEY, now_s=0)
    settle(home, run_turn(home, pool, turn=1, ids=some_ids(16), now_s=0)["nonce"], some_ids(16), now_s=0)
    found = values(home, now_s=60)
    assert found["bidikv_leases", "idle"] == found["bidikv_blocks", "leased"] == 0
    assert found["bidikv_lease_expiries_total",] == 1


def test_an_unforeseen_reason_has_a_series_of_its_own():
    """A label value that is not known from the start appears when it happens, beside the known ones."""
    counts = Counts()
    counts.add(metrics.REVOCATIONS, "home_draining")
    series = counts.snapshot()["bidikv_lease_revocations_total"]
    assert series == [(["home_draining"], 1), (["lease_revoked"], 0), (["model_changed"], 0), (["reset"], 0)]


def test_block_seconds_are_exact():
    """The time between two calls counts with what was held since the first of them."""
    integral = BlockSeconds()
    integral.advance({"lease": 100}, now_s=5)
    integral.advance({"lease": 2}, now_s=8)
    integral.advance({"lease": 7}, now_s=8)
    integral.advance({"lease": 3}, now_s=10)
    assert integral.totals == {"lease": 2 * 3 + 3 * 2}
