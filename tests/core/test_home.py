"""The operations of a home, as the control channel calls them."""

import subprocess
import sys

import pytest

from bidikv_sdk.wire import ErrorInfo, SessionInfo
from server_ext.core.tickets import check_ticket, verify

from .fakes import BLOCK_SIZE, SECRET, FakePool, make_home, packed, some_ids

KEY = {"tenant": "tenant-a", "session_id": "alice"}
OTHER = {"tenant": "tenant-b", "session_id": "alice"}


def begin(home, *, turn, ids, now_s=0.0, key=KEY, **changes):
    """Begin a turn with a ticket wanted."""
    arg = {
        **key,
        "turn": turn,
        "idempotency_key": f"k{turn}",
        "prompt_ids": packed(ids),
        "fingerprint": "model-1",
        "route": "fetch",
        "prefill_urls": ["http://p"],
    }
    return home.handle("begin", arg | changes, now_s=now_s)


def run_request(home, pool, nonce, ids, *, now_s=0.0):
    """Let the scheduler run a request under a nonce to its end."""
    block_ids = pool.take(-(-len(ids) // BLOCK_SIZE))
    assert home.leases.is_open(nonce)
    is_pinned = home.leases.finish(nonce, block_ids, len(ids) - 1, ids, now_s=now_s)
    pool.give_back(block_ids)
    return is_pinned


def settle(home, nonce, ids, *, now_s=0.0, **changes):
    """Settle a turn whose answer keeps all of `ids`."""
    arg = {
        "nonce": nonce,
        "num_tokens_kept": len(ids),
        "token_ids": packed(ids),
        "chunk": b"turn",
        "reply": b"reply",
        "ttl_s": None,
    }
    return home.handle("settle", arg | changes, now_s=now_s)


def run_turn(home, pool, *, turn, ids, now_s=0.0, key=KEY):
    """Run one whole turn; return what settle returned."""
    assert "error" not in home.handle("load", {**key, "turn": turn}, now_s=now_s)
    nonce = begin(home, turn=turn, ids=ids, now_s=now_s, key=key, route="prefill")["nonce"]
    run_request(home, pool, nonce, ids, now_s=now_s)
    return settle(home, nonce, ids, now_s=now_s)


def error_code(result):
    """Return the code of an error, which is all that the result has."""
    assert list(result) == ["error"]
    return ErrorInfo.from_json(result["error"]).code


# ---------------------------------------------------------------- a turn


def test_two_turns_from_load_to_settle():
    """A first turn opens its session; the second is rendered from it, and its prompt is found in the lease."""
    pool = FakePool()
    home = make_home(pool)
    loaded = home.handle("load", {**KEY, "turn": 1, "idempotency_key": "k1"}, now_s=0)
    assert (loaded["reply"], loaded["transcript"], loaded["token_ids"]) == (None, [b""], b"")
    assert loaded["incarnation"] == "life-1"
    begun = begin(home, turn=1, ids=some_ids(10))
    assert (begun["lease_reason"], begun["ticket"], begun["ticket_id"]) == ("first_turn", None, None)
    assert run_request(home, pool, begun["nonce"], some_ids(14))
    info = SessionInfo.from_json(settle(home, begun["nonce"], some_ids(14), ttl_s=30)["info"])
    assert (info.session, info.turn, info.cache) == ("alice", 1, None)
    assert (info.lease.state, info.lease.num_tokens, info.lease.remaining_s) == ("active", 13, 30)
    assert (info.pool.free_blocks, info.pool.total_blocks) == (60, 64)

    loaded = home.handle("load", {**KEY, "turn": 2}, now_s=1)
    assert loaded["transcript"] == [b"", b"turn"]
    assert loaded["token_ids"] == packed(some_ids(14))
    begun = begin(home, turn=2, ids=some_ids(20), now_s=1)
    assert (begun["held_tokens"], begun["matched_tokens"], begun["diverged_at"]) == (13, 13, None)
    assert (begun["lease_reason"], begun["ticket_reason"]) == (None, None)
    assert begun["info"]["pool"]["pending_ticket_blocks"] == 4
    assert home.handle("return_ticket", {"ticket_id": begun["ticket_id"]}, now_s=2) == {"was_open": True}
    assert home.handle("return_ticket", {"ticket_id": begun["ticket_id"]}, now_s=2) == {"was_open": False}


def test_a_ticket_passes_the_readers_checks():
    """What `begin` returns is a signed ticket that the right reader accepts, until the ticket's deadline."""
    pool = FakePool()
    home = make_home(pool, ticket_ttl_s=40)
    run_turn(home, pool, turn=1, ids=some_ids(14))
    begun = begin(home, turn=2, ids=some_ids(20), now_s=5)
    params = verify(begun["ticket"], SECRET)
    assert params["remote_request_id"] == begun["ticket_id"]
    assert params["remote_blocks_expiry_time"] == 45
    assert params["bidikv"]["nonce"] == begun["nonce"]
    fits = check_ticket(params, prompt_ids=some_ids(20), fingerprint="model-1", block_size=BLOCK_SIZE, seen_ids=())
    assert fits is None


def test_a_repetition_gets_its_reply_from_load_and_begin():
    """The last turn with its key returns the stored reply and starts nothing."""
    pool = FakePool()
    home = make_home(pool)
    run_turn(home, pool, turn=1, ids=some_ids(10))
    loaded = home.handle("load", {**KEY, "turn": 1, "idempotency_key": "k1"}, now_s=1)
    begun = begin(home, turn=1, ids=some_ids(10), now_s=1)
    assert loaded == begun
    assert (begun["reply"], begun["info"]["turn"], list(begun)) == (b"reply", 1, ["info", "reply"])
    assert not home.handle("get", KEY, now_s=1)["is_running"]


def test_a_conflict_begins_nothing():
    """A turn that does not fit or is one too many changes nothing, in either table."""
    pool = FakePool()
    home = make_home(pool)
    run_turn(home, pool, turn=1, ids=some_ids(10))
    result = begin(home, turn=4, ids=some_ids(10))
    assert (error_code(result), result["error"]["expected_turn"]) == ("turn_conflict", 2)
    nonce = begin(home, turn=2, ids=some_ids(10))["nonce"]
    before = home.handle("get", KEY, now_s=0)
    result = begin(home, turn=2, ids=some_ids(10))
    assert (error_code(result), result["error"]["retry_after_s"]) == ("turn_conflict", 0.2)
    assert error_code(home.handle("load", {**KEY, "turn": 2}, now_s=0)) == "turn_conflict"
    assert home.handle("get", KEY, now_s=0) == before
    assert home.leases.is_open(nonce)


def test_a_begin_that_fails_half_way_is_undone():
    """If the ticket cannot be made, the turn is not open and no block stays pinned for it."""

    def make_address(deadline_s):
        raise RuntimeError

    pool = FakePool()
    home = make_home(pool, make_address=make_address)
    run_turn(home, pool, turn=1, ids=some_ids(10))
    with pytest.raises(RuntimeError):
        begin(home, turn=2, ids=some_ids(12))
    assert home.handle("get", KEY, now_s=0)["info"]["pool"]["pending_ticket_blocks"] == 0
    assert begin(home, turn=2, ids=some_ids(12), route="prefill")["held_tokens"] == 9


def test_a_turn_whose_conductor_died_is_taken_over():
    """After the timeout a new begin succeeds, and what the old turn does is refused."""
    pool = FakePool()
    home = make_home(pool, turn_timeout_s=10)
    home.handle("open", KEY, now_s=0)
    old = begin(home, turn=1, ids=some_ids(8), now_s=0)["nonce"]
    assert error_code(begin(home, turn=1, ids=some_ids(8), now_s=9)) == "turn_conflict"
    new = begin(home, turn=1, ids=some_ids(8), now_s=10)["nonce"]
    assert (home.leases.is_open(old), home.leases.is_open(new)) == (False, True)
    assert not home.leases.finish(old, [1, 2], 8, some_ids(8), now_s=11)
    assert error_code(settle(home, old, some_ids(8), now_s=11)) == "turn_conflict"
    assert home.handle("abandon", {"nonce": old, "return_ticket": True}, now_s=11) == {"was_open": False}
    assert home.leases.is_open(new)


def test_an_abandoned_turn_is_not_appended():
    """After abandon the same turn can be run again, from the same history and lease."""
    pool = FakePool()
    home = make_home(pool)
    run_turn(home, pool, turn=1, ids=some_ids(10))
    nonce = begin(home, turn=2, ids=some_ids(12))["nonce"]
    run_request(home, pool, nonce, some_ids(16))
    assert home.handle("abandon", {"nonce": nonce, "return_ticket": True}, now_s=0) == {"was_open": True}
    assert pool.num_free_blocks() == 61
    begun = begin(home, turn=2, ids=some_ids(12))
    assert (begun["info"]["turn"], begun["held_tokens"]) == (1, 9)


def test_a_bad_ttl_leaves_the_turn_open():
    """A settle that is refused changes nothing: it can be sent again."""
    pool = FakePool()
    home = make_home(pool)
    home.handle("open", KEY, now_s=0)
    nonce = begin(home, turn=1, ids=some_ids(8))["nonce"]
    run_request(home, pool, nonce, some_ids(8))
    result = settle(home, nonce, some_ids(8), ttl_s="long")
    assert (error_code(result), result["error"]["param"]) == ("invalid_request", "ttl_s")
    assert settle(home, nonce, some_ids(8), ttl_s=10)["info"]["turn"] == 1


# ---------------------------------------------------------------- reasons


def test_a_session_that_moved_here_says_home_lost():
    """A session opened with turns that this home never saw finds nothing held because its home was lost."""
    pool = FakePool()
    home = make_home(pool)
    home.handle("open", {**KEY, "chunk": b"history", "turn": 5}, now_s=0)
    assert begin(home, turn=6, ids=some_ids(8))["lease_reason"] == "home_lost"


def test_a_replaced_transcript_keeps_the_lease():
    """After `replace` the next turn still uses as much of the lease as matches."""
    pool = FakePool()
    home = make_home(pool)
    run_turn(home, pool, turn=1, ids=some_ids(10))
    info = home.handle("open", {**KEY, "chunk": b"new", "turn": 0, "replace": True}, now_s=1)["info"]
    assert (info["turn"], info["lease"]["num_tokens"]) == (0, 9)
    begun = begin(home, turn=1, ids=some_ids(6) + some_ids(6, seed=1), now_s=1)
    assert (begun["matched_tokens"], begun["diverged_at"], begun["lease_reason"]) == (6, 6, None)


def test_opening_at_another_turn_is_a_conflict():
    """An open that does not fit the session is refused with the turn that would."""
    home = make_home(FakePool())
    home.handle("open", {**KEY, "turn": 2}, now_s=0)
    assert home.handle("open", {**KEY, "turn": 1}, now_s=0)["error"]["expected_turn"] == 3


# ---------------------------------------------------------------- the owner


def test_extend_release_and_end():
    """The owner keeps a lease alive, gives it back, and ends the session; each call returns its state."""
    pool = FakePool()
    home = make_home(pool)
    run_turn(home, pool, turn=1, ids=some_ids(10))
    assert home.handle("extend", {**KEY, "ttl_s": 100}, now_s=0)["info"]["lease"]["remaining_s"] == 100
    for _ in range(2):
        assert home.handle("release", KEY, now_s=1)["info"]["lease"]["state"] == "released"
    result = home.handle("extend", {**KEY, "ttl_s": 100}, now_s=1)
    assert (error_code(result), result["error"]["reason"]) == ("lease_lost", "released")
    run_turn(home, pool, turn=2, ids=some_ids(10))
    info = home.handle("end", KEY, now_s=2)["info"]
    assert (info["turn"], info["lease"]["state"], info["pool"]["free_blocks"]) == (2, "released", 64)
    assert error_code(home.handle("end", KEY, now_s=2)) == "session_not_found"
    begun = run_turn(home, pool, turn=1, ids=some_ids(10))
    assert begun["info"]["turn"] == 1


@pytest.mark.parametrize(
    ("op", "extra"),
    [
        ("load", {"turn": 2}),
        ("begin", {"turn": 1, "prompt_ids": b"", "fingerprint": "", "route": "fetch"}),
        ("extend", {"ttl_s": 5}),
        ("release", {}),
        ("fork", {"child_id": "c"}),
        ("rewind", {"turn": 0}),
        ("end", {}),
        ("get", {}),
    ],
)
def test_another_tenants_session_is_as_unknown_as_any(op, extra):
    """A stranger's answer for a session that exists is the one for a session that does not."""
    pool = FakePool()
    home = make_home(pool)
    run_turn(home, pool, turn=1, ids=some_ids(10))
    result = home.handle(op, {**OTHER, **extra}, now_s=0)
    assert error_code(result) == "session_not_found"
    assert result == make_home(FakePool()).handle(op, {**OTHER, **extra}, now_s=0)


def test_sessions_are_listed_by_tenant_or_all():
    """A tenant sees its own sessions; without a tenant all are listed."""
    pool = FakePool()
    home = make_home(pool)
    run_turn(home, pool, turn=1, ids=some_ids(10))
    home.handle("open", OTHER, now_s=0)
    (listed,) = home.handle("list", {"tenant": "tenant-a"}, now_s=0)["sessions"]
    assert (listed["tenant"], listed["is_running"]) == ("tenant-a", False)
    assert SessionInfo.from_json(listed["info"]).lease.num_tokens == 9
    assert len(home.handle("list", {}, now_s=0)["sessions"]) == 2


def test_who_looks_sees_what_the_last_turn_did():
    """Get and list tell the last turn's report, as it was given; none before a turn, nor behind a rewind."""
    pool = FakePool()
    home = make_home(pool)
    home.handle("open", KEY, now_s=0)
    assert home.handle("get", KEY, now_s=0)["last_report"] == b""
    ids = some_ids(10)
    nonce = begin(home, turn=1, ids=ids)["nonce"]
    run_request(home, pool, nonce, ids)
    settle(home, nonce, ids, report=b"fetched")
    assert home.handle("get", KEY, now_s=0)["last_report"] == b"fetched"
    assert home.handle("list", {}, now_s=0)["sessions"][0]["last_report"] == b"fetched"
    home.handle("rewind", {**KEY, "turn": 0}, now_s=0)
    assert home.handle("get", KEY, now_s=0)["last_report"] == b""


def test_a_dropped_session_takes_its_lease_along():
    """When the store makes room, the dropped session's blocks return to the pool."""
    pool = FakePool()
    home = make_home(pool, max_sessions=1)
    run_turn(home, pool, turn=1, ids=some_ids(10))
    home.handle("open", OTHER, now_s=1)
    assert pool.num_free_blocks() == 64
    assert error_code(home.handle("get", KEY, now_s=1)) == "session_not_found"


def test_an_ended_session_takes_its_running_turn_along():
    """Ending a session gives up its open turn: the request that still runs is not pinned."""
    pool = FakePool()
    home = make_home(pool)
    home.handle("open", KEY, now_s=0)
    nonce = begin(home, turn=1, ids=some_ids(8))["nonce"]
    home.handle("end", KEY, now_s=0)
    assert not home.leases.is_open(nonce)
    assert error_code(settle(home, nonce, some_ids(8))) == "turn_conflict"
    assert pool.num_free_blocks() == 64


def test_a_first_turn_after_retention_opens_the_session_anew():
    """A session that fell due is unknown, so a first turn opens it, and others must open it themselves."""
    pool = FakePool()
    home = make_home(pool, session_retention_s=1000)
    run_turn(home, pool, turn=1, ids=some_ids(10))
    assert error_code(home.handle("load", {**KEY, "turn": 2}, now_s=1000)) == "session_not_found"
    assert home.handle("load", {**KEY, "turn": 1}, now_s=1000)["info"]["turn"] == 0


# ---------------------------------------------------------------- forks and rewinds


def test_a_fork_continues_exactly_from_its_turn():
    """What a child loads is what its parent would have loaded then, and its first turn may read the parent's blocks."""
    pool = FakePool()
    home = make_home(pool)
    run_turn(home, pool, turn=1, ids=some_ids(10))
    then = home.handle("load", {**KEY, "turn": 2}, now_s=0)
    run_turn(home, pool, turn=2, ids=some_ids(20))
    fork = {**KEY, "child_id": "child", "at_turn": 1, "ttl_s": 40}
    info = SessionInfo.from_json(home.handle("fork", fork, now_s=1)["info"])
    assert (info.session, info.turn) == ("child", 1)
    assert (info.lease.state, info.lease.num_tokens, info.lease.remaining_s) == ("active", 10, 40)
    assert home.handle("fork", {**fork, "ttl_s": 50}, now_s=2)["info"]["lease"]["remaining_s"] == 39
    child = {**KEY, "session_id": "child"}
    loaded = home.handle("load", {**child, "turn": None}, now_s=2)
    for name in ("transcript", "token_ids", "id_counts"):
        assert loaded[name] == then[name]
    begun = begin(home, turn=2, ids=some_ids(12), now_s=2, key=child)
    assert (begun["held_tokens"], begun["matched_tokens"], begun["diverged_at"]) == (10, 10, None)
    assert begun["ticket"] is not None


def test_a_fork_whose_arguments_are_wrong_makes_nothing():
    """A child needs an id of its own and a good ttl; the home is as it was."""
    pool = FakePool()
    home = make_home(pool)
    run_turn(home, pool, turn=1, ids=some_ids(10))
    for changes, param in (({"child_id": "alice"}, "child_id"), ({"ttl_s": -1}, "ttl_s")):
        result = home.handle("fork", {**KEY, "child_id": "child", **changes}, now_s=0)
        assert (error_code(result), result["error"]["param"]) == ("invalid_request", param)
    assert len(home.handle("list", {}, now_s=0)["sessions"]) == 1


def test_a_rewound_session_keeps_what_it_still_needs():
    """Rewinding cuts record and lease alike; the turn after it finds all that is left."""
    pool = FakePool()
    home = make_home(pool)
    run_turn(home, pool, turn=1, ids=some_ids(10))
    run_turn(home, pool, turn=2, ids=some_ids(20))
    info = SessionInfo.from_json(home.handle("rewind", {**KEY, "turn": 1}, now_s=1)["info"])
    assert (info.turn, info.lease.num_tokens) == (1, 10)
    begun = begin(home, turn=2, ids=some_ids(10) + some_ids(5, seed=3), now_s=2)
    assert (begun["matched_tokens"], begun["diverged_at"]) == (10, None)


def test_a_turn_of_a_full_history_replaces_what_it_does_not_continue():
    """The next turn, whatever its number: it begins where the prompt was rendered from, or not at all."""
    pool = FakePool()
    home = make_home(pool)
    assert home.handle("load", {**KEY, "turn": None}, now_s=0)["info"]["turn"] == 0
    run_turn(home, pool, turn=1, ids=some_ids(10))
    run_turn(home, pool, turn=2, ids=some_ids(20))
    loaded = home.handle("load", {**KEY, "turn": None}, now_s=0)
    assert loaded["id_counts"] == [0, 10, 20]
    at = {"revision": loaded["revision"], "num_kept": 2}
    ids = some_ids(10) + some_ids(6, seed=2)
    begun = begin(home, turn=3, ids=ids, idempotency_key="", **at)
    assert (begun["matched_tokens"], begun["diverged_at"]) == (10, 10)
    run_request(home, pool, begun["nonce"], ids)
    settled = settle(home, begun["nonce"], ids)
    assert (settled["info"]["turn"], settled["info"]["lease"]["num_tokens"]) == (2, 15)
    assert error_code(begin(home, turn=3, ids=ids, **at)) == "turn_conflict"
    assert settled["revision"] == home.handle("load", {**KEY, "turn": 3}, now_s=0)["revision"]


def test_a_history_of_another_life_is_never_this_one():
    """A session that was opened again in the engine's next life has other revisions, though as many changes."""
    revisions = set()
    for incarnation in ("life 1", "life 2"):
        pool = FakePool()
        home = make_home(pool, incarnation=incarnation)
        run_turn(home, pool, turn=1, ids=some_ids(10))
        revisions.add(home.handle("load", {**KEY, "turn": 2}, now_s=0)["revision"])
    assert len(revisions) == 2


# ---------------------------------------------------------------- the scheduler


def test_the_scheduler_sweeps_revokes_and_releases():
    """What the engine asks for goes to the lease table."""
    pool = FakePool()
    home = make_home(pool)
    run_turn(home, pool, turn=1, ids=some_ids(18))
    assert home.leases.num_reclaimable(now_s=0) == 5
    assert home.leases.num_reclaimable(now_s=0, limit=3) == 3
    assert home.leases.revoke(2, now_s=0) == 2
    assert home.handle("metrics", {}, now_s=0)["metrics"]["bidikv_revoked_blocks_total"] == [([], 2)]
    assert not home.leases.has_tickets(now_s=0)
    home.leases.release_all("reset", now_s=0)
    assert home.handle("get", KEY, now_s=0)["info"]["lease"]["reason"] == "reset"
    run_turn(home, pool, turn=2, ids=some_ids(18))
    assert home.sweep(now_s=60) == 1
    assert home.sweep(now_s=3600) == 1
    assert pool.num_free_blocks() == 64


# ---------------------------------------------------------------- the door


@pytest.mark.parametrize(
    ("op", "arg", "message"),
    [
        ("explode", {}, "operation 'explode' is unknown: use one of open, load, "),
        ("__init__", {}, "is unknown"),
        ("get", None, "get is missing: give an object"),
        ("get", [1], "get is list: give an object"),
        ("get", {"tenant": "t"}, "session_id is missing: give a string"),
        ("get", KEY | {"turn": 1}, "'get' has no field 'turn': use tenant, session_id"),
        ("get", KEY | {5: 1}, "has no field 5"),
        ("get", KEY | {"tenant": b"t"}, "tenant is bytes: give a string"),
        ("load", KEY | {"turn": True}, "turn is bool: give an integer, 0 or more"),
        ("load", KEY | {"turn": -1}, "turn is int: give an integer, 0 or more"),
        (
            "return_ticket",
            {"ticket_id": "t", "read_age_s": -1},
            "read_age_s is int: give a number of seconds, 0 or more",
        ),
        (
            "settle",
            {"nonce": "n", "num_tokens_kept": 0, "token_ids": b"", "chunk": b"", "reply": b"", "ended_by": 7},
            "ended_by is int: give a string",
        ),
        ("open", KEY | {"replace": 1}, "replace is int: give true or false"),
        ("open", KEY | {"chunk": "text"}, "chunk is str: give bytes"),
        ("abandon", {"nonce": "n", "return_ticket": None}, "return_ticket is missing"),
        (
            "begin",
            KEY | {"turn": 1, "prompt_ids": b"12345", "fingerprint": "f", "route": "fetch"},
            "prompt_ids has 5 bytes: give token ids as packed int32, 4 bytes each",
        ),
    ],
)
def test_a_malformed_argument_is_refused_by_name(op, arg, message):
    """The operations are closed: unknown ones and ill-typed fields are refused, and values are not repeated."""
    result = make_home(FakePool()).handle(op, arg, now_s=0)
    assert error_code(result) == "invalid_request"
    assert message in result["error"]["message"]


def test_bytes_may_come_in_any_buffer():
    """Decoders hand out bytes, bytearrays or memoryviews; all are bytes here."""
    home = make_home(FakePool())
    for buffer in (bytes, bytearray, memoryview):
        result = home.handle("open", KEY | {"chunk": buffer(b"abc"), "replace": True}, now_s=0)
        assert result["info"]["turn"] == 0
    assert home.handle("load", {**KEY, "turn": 1}, now_s=0)["transcript"] == [b"abc"]


def test_the_core_imports_nothing_heavy():
    """Importing the whole core in a fresh interpreter loads no engine, no tensors and no web framework."""
    script = (
        "import sys, server_ext.core.home, server_ext.core.tickets;"
        "print(*{'vllm', 'torch', 'numpy', 'fastapi'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""
