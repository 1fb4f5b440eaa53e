"""Which lease gives way first when its value decides."""

import math
from array import array
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server_ext.core.gaps import GapModel
from server_ext.core.policy import LeastValueFirst
from server_ext.core.rates import ConstantRates
from server_ext.core.records import Lease

from .fakes import BLOCK_SIZE, FakePool, blocks_of, make_home, make_table, packed, run_turn, some_ids

RATES = ConstantRates(attention_tokens=40)


def make_lease(name, block_ids, *, due_s=60.0):
    """Return a lease on whole blocks."""
    num_tokens = BLOCK_SIZE * len(block_ids)
    return Lease(
        due_s=due_s,
        key=("t", name),
        block_ids=array("i", block_ids),
        num_tokens=num_tokens,
        token_ids=array("i", range(num_tokens)),
        fingerprint="m",
        ttl_s=60,
    )


def names(leases):
    """Return the sessions of leases."""
    return [lease.key[1] for lease in leases]


def make_order(leases, gaps, *, held_by_others=()):
    """Return the policy over a pool in which these leases are all that is held, but for what others hold."""
    references = Counter(block_id for lease in leases for block_id in lease.block_ids)
    references.update(held_by_others)
    return LeastValueFirst(gaps, RATES, references.__getitem__, block_size=BLOCK_SIZE)


def test_who_is_unlikely_to_return_gives_way_first():
    """At equal length, sessions that wait for a human go before those that wait for a tool."""
    leases = [make_lease("tool", range(4)), make_lease("human", range(4, 8)), make_lease("unknown", range(8, 12))]
    gaps = GapModel()
    gaps.ended(("t", "tool"), "tool:bash", now_s=0)
    gaps.ended(("t", "human"), "stop", now_s=-30)
    assert names(make_order(leases, gaps)(leases, now_s=0)) == ["human", "unknown", "tool"]


def test_long_sessions_are_worth_more_per_block():
    """Attention makes the blocks of a long history dearer to compute again than those of a short one."""
    leases = [make_lease("long", range(20)), make_lease("short", range(20, 24))]
    assert names(make_order(leases, GapModel())(leases, now_s=0)) == ["short", "long"]


def test_a_lease_without_exclusive_blocks_comes_last():
    """Revoking what others hold as well gains nothing, however little it is worth."""
    leases = [make_lease("held", range(4)), make_lease("long", range(4, 30))]
    order = make_order(leases, GapModel(), held_by_others=range(4))
    assert names(order(leases, now_s=0)) == ["long", "held"]


def test_a_lease_that_nobody_will_use_is_worth_nothing():
    """Leases whose deadline has come are first, the longest overdue at the front."""
    leases = [make_lease("a", range(2)), make_lease("b", range(2, 9), due_s=5), make_lease("c", range(9, 11), due_s=4)]
    assert names(make_order(leases, GapModel())(leases, now_s=6)) == ["c", "b", "a"]


def test_values_are_kept_for_a_second_unless_a_lease_changes():
    """Under pressure the chances are not computed again at every step, but a new deadline counts at once."""
    leases = [make_lease("a", range(4)), make_lease("b", range(4, 8))]
    gaps = GapModel()
    gaps.ended(("t", "a"), "stop", now_s=0)
    gaps.ended(("t", "b"), "stop", now_s=0)
    order = make_order(leases, gaps)
    assert names(order(leases, now_s=0)) == ["a", "b"]
    gaps.ended(("t", "a"), "tool:bash", now_s=0)
    assert names(order(leases, now_s=0.9)) == ["a", "b"]
    assert names(order(leases, now_s=1)) == ["b", "a"]
    leases[1].due_s = 1e6
    assert names(order(leases, now_s=1.5)) == ["a", "b"]


def test_what_was_taken_from_a_lease_counts_at_once():
    """The longer a lease the more its last block is worth: one that has been clipped is ranked anew."""
    leases = [make_lease("a", range(900)), make_lease("b", range(900, 1700)), make_lease("new", range(1700, 2650))]
    order = make_order(leases, GapModel())
    new = leases.pop()
    victims = order(leases, now_s=0)
    assert [next(victims).key[1] for _ in leases] == ["b", "a"]
    del leases[0].block_ids[1:]
    victims.close()
    assert names(order(leases, now_s=0.4)) == ["a", "b"]
    assert names(order([*leases, new], now_s=0.5)) == ["a", "b", "new"]
    assert names(order([new, leases[1]], now_s=0.6)) == ["b", "new"]


def test_a_call_that_goes_on_hides_nothing_from_the_next():
    """What a call that was not read to its end has looked at is there for the next one too."""
    leases = [make_lease("a", range(4)), make_lease("b", range(4, 7))]
    order = make_order(leases, GapModel())
    victims = order(leases, now_s=0)
    assert next(victims).key[1] == "b"
    assert names(order(leases, now_s=0.5)) == ["b", "a"]
    victims.close()
    assert names(order(leases, now_s=0.6)) == ["b", "a"]


@given(
    shapes=st.lists(
        st.tuples(st.integers(0, 6), st.integers(0, 20), st.floats(1, 900), st.floats(0, 600), st.booleans()),
        max_size=12,
    )
)
def test_the_order_is_that_of_value_per_exclusive_block(shapes):
    """Each lease comes once, and by the value that counting all its blocks gives, shared prefixes or not."""
    gaps, leases, now_s = GapModel(), [], 700.0
    for index, (num_shared, num_own, ttl_s, idle_s, is_tool) in enumerate(shapes):
        own = range(100 + 20 * index, 100 + 20 * index + max(num_own, 1 - num_shared))
        leases.append(make_lease(str(index), [*range(num_shared), *own], due_s=now_s + ttl_s))
        gaps.ended(leases[-1].key, "tool:x" if is_tool else "stop", now_s=now_s - idle_s)
    references = Counter(block_id for lease in leases for block_id in lease.block_ids)

    def value(lease):
        num_exclusive = sum(references[block_id] == 1 for block_id in lease.block_ids)
        if not num_exclusive:
            return math.inf
        num_shared = len(lease.block_ids) - num_exclusive
        cost_s = RATES.prefill_s(num_exclusive * BLOCK_SIZE, num_cached=num_shared * BLOCK_SIZE)
        return gaps.return_chance(lease.key, lease.due_s, now_s=now_s) * cost_s / num_exclusive

    ordered = list(make_order(leases, gaps)(leases, now_s=now_s))
    assert sorted(map(id, ordered)) == sorted(map(id, leases))
    values = [value(lease) for lease in ordered]
    assert values == pytest.approx(sorted(values))


def test_the_table_takes_the_least_value_and_no_more_than_it_needs():
    """Under pressure the session that waits for a human loses its tail; the one in a tool call keeps all."""
    pool, gaps = FakePool(32), GapModel()
    order = LeastValueFirst(gaps, RATES, pool.num_references, block_size=BLOCK_SIZE)
    table = make_table(pool, order=order)
    for seed, (name, ended_by) in enumerate([("tool", "tool:bash"), ("human", "stop")]):
        run_turn(table, pool, ("t", name), some_ids(24, seed=seed), now_s=0, nonce=name)
        gaps.ended(("t", name), ended_by, now_s=0)
    assert table.revoke(4, now_s=1) == 4
    assert len(blocks_of(table, ("t", "human"))) == 2
    assert len(blocks_of(table, ("t", "tool"))) == 6


def run_home_turn(home, pool, name, turn, *, now_s, ended_by, seed=0, ttl_s=60):
    """Run a turn of four blocks through the home's operations."""
    key, ids = {"tenant": "t", "session_id": name}, some_ids(16, seed=seed)
    home.handle("load", key | {"turn": turn}, now_s=now_s)
    arg = {"turn": turn, "prompt_ids": packed(ids), "fingerprint": "m", "route": "local"}
    nonce = home.handle("begin", key | arg, now_s=now_s)["nonce"]
    block_ids = pool.take(4)
    home.leases.finish(nonce, block_ids, 16, ids, now_s=now_s)
    pool.give_back(block_ids)
    end = {"nonce": nonce, "num_tokens_kept": 16, "token_ids": packed(ids), "chunk": b"", "reply": b""}
    home.handle("settle", end | {"ttl_s": ttl_s, "ended_by": ended_by}, now_s=now_s)


def num_leased(home, name, *, now_s):
    """Return the blocks of a session's lease."""
    info = home.handle("get", {"tenant": "t", "session_id": name}, now_s=now_s)["info"]
    return info["lease"]["num_blocks"]


@pytest.mark.parametrize(("revocation", "loser"), [("value", "human"), ("least_remaining", "tool")])
def test_a_setting_chooses_the_policy(revocation, loser):
    """The home knows how turns end; the setting decides whether that matters."""
    pool = FakePool(32)
    home = make_home(pool, revocation=revocation)
    run_home_turn(home, pool, "tool", 1, now_s=0, ended_by="tool:bash", ttl_s=50)
    run_home_turn(home, pool, "human", 1, now_s=0, ended_by=None, seed=1)
    assert home.leases.revoke(2, now_s=1) == 2
    for name in ("tool", "human"):
        assert num_leased(home, name, now_s=1) == (2 if name == loser else 4)


def test_the_home_learns_from_the_gaps_between_turns():
    """A tool after which sessions came back late is worth less than one after which they came back at once."""
    pool = FakePool(32)
    home = make_home(pool)
    for turn in range(10):
        run_home_turn(home, pool, "slow", turn + 1, now_s=500 * turn, ended_by="tool:build")
    for turn in range(10):
        run_home_turn(home, pool, "fast", turn + 1, now_s=4990 + turn, ended_by="tool:ls", seed=1)
    run_home_turn(home, pool, "new, in build", 1, now_s=5000, ended_by="tool:build", seed=2)
    run_home_turn(home, pool, "new, in ls", 1, now_s=5000, ended_by="tool:ls", seed=3)
    assert home.leases.revoke(4, now_s=5000.1) == 4
    assert num_leased(home, "new, in build", now_s=5000.1) == 0
    assert num_leased(home, "new, in ls", now_s=5000.1) == 4


def test_what_is_known_of_a_session_goes_with_it():
    """Ended sessions leave nothing behind in the gap model."""
    pool = FakePool(32)
    home = make_home(pool)
    run_home_turn(home, pool, "a", 1, now_s=0, ended_by="stop")
    assert len(home._gaps) == 1  # noqa: SLF001 (what a leak would look like from outside is memory)
    home.handle("end", {"tenant": "t", "session_id": "a"}, now_s=1)
    assert len(home._gaps) == 0  # noqa: SLF001
