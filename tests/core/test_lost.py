"""Leases that are gone get back what of their blocks is still there, and never anything else."""

from array import array

import pytest

from server_ext.core.metrics import EXPIRIES, GRANTS, REGAINS

from .fakes import ALICE, BLOCK_SIZE, BOB, FakePool, blocks_of, make_table, run_turn, some_ids, verify_references

CAROL = (ALICE[0], "carol")
IDS = some_ids(22)


@pytest.fixture
def pool():
    """A pool of 16 blocks."""
    return FakePool(16)


@pytest.fixture
def table(pool):
    """A table whose one lease, of five full blocks and a half, expires at 10."""
    table = make_table(pool)
    run_turn(table, pool, ALICE, IDS, now_s=0, nonce="a", ttl_s=10)
    return table


def begin(table, *, now_s=20, key=ALICE, ids=IDS, nonce="again", want_ticket=True, fingerprint="model-1"):
    """Begin a turn that continues the lost lease's history."""
    return table.begin(key, ids, fingerprint, now_s=now_s, want_ticket=want_ticket, nonce=nonce)


def verify_nothing_regained(table, pool, begun):
    """Verify that a turn found no lease and that the table holds nothing."""
    assert (begun.held_tokens, begun.ticket) == (0, None)
    assert pool.num_free_blocks() == pool.num_blocks
    assert table.counts.get(REGAINS) == 0


def test_an_expired_lease_is_regained_for_a_reader(pool, table):
    """Its full blocks are pinned again and can be read; the report says that it had expired."""
    held = blocks_of(table, ALICE)
    table.sweep(now_s=10)
    assert pool.num_free_blocks() == 16
    begun = begin(table)
    assert (begun.held_tokens, begun.matched_tokens, begun.lease_reason) == (20, 20, "lease_expired")
    assert list(begun.ticket.block_ids) == blocks_of(table, ALICE) == held[:5]
    info = table.info(ALICE, now_s=20)
    assert (info.state, info.num_tokens, info.reason) == ("active", 20, "lease_expired")
    assert (table.counts.get(REGAINS), table.num_leased_blocks) == (1, 5)
    verify_references(table, pool)


def test_a_lease_that_expires_in_the_call_itself_is_regained(table):
    """No sweep has to come before; the turn that comes too late is served all the same."""
    assert begin(table, now_s=10).matched_tokens == 20
    assert table.counts.get(EXPIRIES) == 1


def test_a_regained_lease_lives_as_long_as_it_did(pool, table):
    """An abandoned turn leaves it to its owner with the same life, and it expires as any other."""
    begin(table, now_s=20)
    table.abandon("again", return_ticket=True, now_s=21)
    assert table.info(ALICE, now_s=21).remaining_s == 10
    table.sweep(now_s=31)
    assert pool.num_free_blocks() == 16
    assert begin(table, now_s=40, nonce="third").matched_tokens == 20


def test_a_turn_behind_a_regained_lease_makes_a_whole_one(pool, table):
    """Its lease supersedes the regained one, and nothing of the loss is said any more."""
    begin(table)
    block_ids = pool.take(1, shared=blocks_of(table, ALICE))
    table.finish("again", block_ids, 24, some_ids(24), now_s=21)
    pool.give_back(block_ids)
    table.return_ticket("t0", now_s=21)
    info = table.settle("again", 24, ttl_s=10, now_s=21)
    assert (info.state, info.num_tokens, info.reason) == ("active", 24, None)
    assert table.counts.get(GRANTS) == 2
    verify_references(table, pool)


def test_only_what_nobody_has_written_over_is_regained(pool, table):
    """The blocks behind the first one that a request has used since are lost, intact or not."""
    held = blocks_of(table, ALICE)
    table.sweep(now_s=10)
    others = pool.take(16 - 3)  # the longest free first, and of the lease its tail
    assert held[3] in others
    pool.give_back(others)
    begun = begin(table)
    assert (begun.matched_tokens, list(begun.ticket.block_ids)) == (12, held[:3])


def test_nothing_is_regained_of_a_lease_whose_first_block_is_lost(pool, table):
    """Without its first block a lease is nothing."""
    table.sweep(now_s=10)
    pool.give_back(pool.take(16))
    verify_nothing_regained(table, pool, begin(table))


def test_equal_content_that_was_written_anew_is_not_regained(pool, table):
    """A block that got another seal may only just be computed, whatever it is going to hold."""
    held = blocks_of(table, ALICE)
    table.sweep(now_s=10)
    pool.seal[held[1]] = object()
    assert begin(table).matched_tokens == BLOCK_SIZE


def test_blocks_that_the_cache_does_not_know_are_not_remembered(pool, table):
    """A lost lease ends where the prefix cache does."""
    held = blocks_of(table, ALICE)
    pool.seal[held[2]] = None
    table.sweep(now_s=10)
    assert begin(table).matched_tokens == 2 * BLOCK_SIZE
    del pool.seal[held[0]]
    table.abandon("again", return_ticket=True, now_s=20)
    table.sweep(now_s=30)
    verify_references(table, pool)
    assert begin(table, now_s=30, nonce="third").held_tokens == 0


def test_a_revoked_lease_is_regained(pool, table):
    """What a request took the lease for, but did not use, comes back to it."""
    held = blocks_of(table, ALICE)
    assert table.revoke(6, now_s=1) == 6
    begun = begin(table, now_s=2)
    assert (begun.matched_tokens, begun.lease_reason) == (20, "lease_revoked")
    assert blocks_of(table, ALICE) == held[:5]


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_released_lease_is_never_regained(pool, table, when):
    """Release is the owner's word: it also speaks of a lease that had expired before."""
    if when == "after":
        table.sweep(now_s=10)
    table.release(ALICE, now_s=5 if when == "before" else 15)
    begun = begin(table)
    assert begun.lease_reason == "released"
    verify_nothing_regained(table, pool, begun)


def test_a_reset_leaves_nothing_to_regain(pool, table):
    """Neither leases that the reset took nor those that were gone before it come back."""
    run_turn(table, pool, BOB, some_ids(8, seed=1), now_s=0, nonce="b", ttl_s=100)
    table.sweep(now_s=10)
    table.release_all("reset", now_s=11)
    for key, ids in ((ALICE, IDS), (BOB, some_ids(8, seed=1))):
        verify_nothing_regained(table, pool, begin(table, key=key, ids=ids, nonce=key[1]))


def test_a_forgotten_session_has_nothing_to_regain(pool, table):
    """A session of the same id, opened later, finds nothing of the old one."""
    table.sweep(now_s=10)
    table.forget(ALICE, now_s=11)
    begun = begin(table)
    assert begun.lease_reason == "first_turn"
    verify_nothing_regained(table, pool, begun)


def test_other_weights_regain_nothing(pool, table):
    """Blocks that another model has computed stay where they are."""
    table.sweep(now_s=10)
    verify_nothing_regained(table, pool, begin(table, fingerprint="model-2"))


def test_a_turn_without_a_reader_regains_nothing(pool, table):
    """Where D computes by itself its own prefix cache finds the blocks."""
    table.sweep(now_s=10)
    verify_nothing_regained(table, pool, begin(table, want_ticket=False))


def test_a_granted_lease_ends_what_was_lost_before(pool, table):
    """Only the last lease of a session can come back."""
    table.sweep(now_s=10)
    run_turn(table, pool, ALICE, some_ids(4, seed=7), now_s=11, nonce="b", ttl_s=5)
    table.sweep(now_s=16)
    begun = begin(table)
    assert (begun.held_tokens, begun.matched_tokens) == (4, 0)


def test_regaining_keeps_to_the_budget(pool):
    """No more is pinned again than a grant would get, and nothing where there is no room."""
    table = make_table(pool, budget_fraction=0.5, tenant_share=1.0)
    run_turn(table, pool, ALICE, IDS, now_s=0, nonce="a", ttl_s=10)
    table.sweep(now_s=10)
    run_turn(table, pool, CAROL, some_ids(24, seed=3), now_s=10, nonce="c", ttl_s=100)
    begun = begin(table)
    assert (begun.matched_tokens, table.num_leased_blocks) == (8, 8)
    table.abandon("again", return_ticket=True, now_s=20)
    table.sweep(now_s=30)
    run_turn(table, pool, BOB, some_ids(8, seed=4), now_s=30, nonce="b", ttl_s=100)
    assert begin(table, now_s=31, nonce="third").held_tokens == 0
    verify_references(table, pool)


def test_a_shared_block_is_regained_beside_its_other_holder(pool, table):
    """What a fork still holds has never been free."""
    table.fork(ALICE, CAROL, array("i", IDS), ttl_s=100, now_s=1)
    table.sweep(now_s=10)
    assert begin(table).matched_tokens == 20
    assert pool.num_references(blocks_of(table, ALICE)[0]) == 3
    verify_references(table, pool)


def test_no_more_lost_blocks_are_remembered_than_there_are():
    """The longest lost leases are forgotten, so that sessions without leases cost no memory without end."""
    pool = FakePool(8)
    table = make_table(pool)
    for i in range(100):
        key = (ALICE[0], str(i))
        run_turn(table, pool, key, some_ids(12, seed=i), now_s=i * 10, nonce=f"n{i}", ttl_s=1)
    table.sweep(now_s=1000)
    assert table._held.lost.num_blocks == 6  # noqa: SLF001 (what a leak would look like from outside is memory)
