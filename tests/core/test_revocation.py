"""Leases give way to requests: as many blocks as needed, from the tails, and no more."""

import pytest

from server_ext.core.metrics import REVOKED_BLOCKS

from .fakes import ALICE, BOB, FakePool, blocks_of, make_table, run_turn, some_ids, verify_references

CAROL = ("tenant-a", "carol")


def make_leases(pool, table, **num_blocks_and_ttl):
    """Make one lease per keyword: name=(num_blocks, ttl_s), all with blocks of their own."""
    keys = {}
    for seed, (name, (num_blocks, ttl_s)) in enumerate(num_blocks_and_ttl.items()):
        keys[name] = ("t", name)
        ids = some_ids(4 * num_blocks, seed=seed)
        run_turn(table, pool, keys[name], ids, now_s=0, nonce=name, ttl_s=ttl_s)
    return keys


def test_no_more_is_revoked_than_is_needed():
    """A lease that has more than is needed is clipped from its tail, and is still of use."""
    pool = FakePool(16)
    table = make_table(pool)
    run_turn(table, pool, ALICE, some_ids(30), now_s=0, nonce="a")
    held = blocks_of(table, ALICE)
    assert table.revoke(3, now_s=1) == 3
    assert blocks_of(table, ALICE) == held[:5]
    info = table.info(ALICE, now_s=1)
    assert (info.state, info.num_tokens, info.num_blocks, info.reason) == ("active", 20, 5, "lease_revoked")
    begun = table.begin(ALICE, some_ids(30), "model-1", now_s=1, want_ticket=True, nonce="b")
    assert (begun.matched_tokens, begun.diverged_at, begun.lease_reason) == (20, None, "lease_revoked")
    assert table.num_leased_blocks == 5
    verify_references(table, pool)


def test_a_partly_filled_tail_is_clipped_to_whole_blocks():
    """Clipping the last, partly filled block leaves the full ones before it."""
    pool = FakePool(16)
    table = make_table(pool)
    run_turn(table, pool, ALICE, some_ids(9), now_s=0, nonce="a")
    table.revoke(1, now_s=1)
    assert table.info(ALICE, now_s=1).num_tokens == 8


def test_what_expired_goes_first():
    """Blocks of expired leases count towards the need, so no live lease is touched for them."""
    pool = FakePool(16)
    table = make_table(pool)
    keys = make_leases(pool, table, short=(3, 5), long=(3, 50))
    assert table.revoke(3, now_s=5) == 3
    assert table.info(keys["long"], now_s=5).num_blocks == 3
    assert table.counts.get(REVOKED_BLOCKS) == 0


def test_the_lease_with_the_least_remaining_time_gives_way_first():
    """The default order keeps longest what its owner asked to keep longest; a renewal counts."""
    pool = FakePool(32)
    table = make_table(pool)
    keys = make_leases(pool, table, x=(2, 50), y=(2, 40), z=(2, 30))
    table.extend(keys["z"], 60, now_s=0)
    assert table.revoke(3, now_s=1) == 3
    sizes = {name: table.info(key, now_s=1).num_blocks for name, key in keys.items()}
    assert sizes == {"x": 1, "y": 0, "z": 2}
    info = table.info(keys["y"], now_s=1)
    assert (info.state, info.reason) == ("revoked", "lease_revoked")


def test_leases_of_running_turns_and_pins_go_last():
    """Idle leases first, then those whose turn runs, and what was just computed at the very last."""
    pool = FakePool(32)
    table = make_table(pool)
    keys = make_leases(pool, table, running=(2, 10), idle=(2, 50))
    table.begin(keys["running"], some_ids(8), "model-1", now_s=1, want_ticket=False, nonce="r")
    block_ids = pool.take(2)
    table.finish("r", block_ids, 8, some_ids(8), now_s=1)
    pool.give_back(block_ids)
    assert table.num_reclaimable(now_s=1) == 6
    assert table.revoke(2, now_s=1) == 2
    assert table.info(keys["idle"], now_s=1).state == "revoked"
    assert table.revoke(2, now_s=1) == 2
    assert table.info(keys["running"], now_s=1).state == "revoked"
    assert table.revoke(1, now_s=1) == 1
    info = table.settle("r", 8, ttl_s=None, now_s=1)
    assert (info.state, info.num_tokens, info.reason) == ("active", 4, "lease_revoked")
    verify_references(table, pool)


def test_a_pin_can_be_revoked_as_a_whole():
    """A turn whose pin was taken is settled without a lease and says why."""
    pool = FakePool(8)
    table = make_table(pool)
    table.begin(ALICE, some_ids(8), "model-1", now_s=0, want_ticket=False, nonce="a")
    block_ids = pool.take(2)
    table.finish("a", block_ids, 8, some_ids(8), now_s=0)
    pool.give_back(block_ids)
    assert table.revoke(5, now_s=0) == 2
    info = table.settle("a", 8, ttl_s=None, now_s=0)
    assert (info.state, info.reason) == ("revoked", "lease_revoked")


def test_blocks_that_a_request_holds_gain_nothing():
    """No lease is clipped for blocks that a running request keeps in use anyway."""
    pool = FakePool(16)
    table = make_table(pool)
    run_turn(table, pool, ALICE, some_ids(16), now_s=0, nonce="a", ttl_s=5)
    run_turn(table, pool, BOB, some_ids(4, seed=1), now_s=0, nonce="b", ttl_s=50)
    request = pool.take(1, shared=blocks_of(table, ALICE)[:3])
    assert table.num_reclaimable(now_s=1) == 2
    assert table.revoke(2, now_s=1) == 2
    assert table.info(ALICE, now_s=1).num_blocks == 3
    assert table.info(BOB, now_s=1).num_blocks == 0
    assert table.revoke(1, now_s=1) == 0
    assert table.info(ALICE, now_s=1).num_blocks == 3
    pool.give_back(request)
    assert table.num_reclaimable(now_s=1) == 3


def test_a_shared_prefix_is_freed_with_its_last_lease_only():
    """Leases on one system prompt lose their own tails first; the prompt goes when all of them must."""
    pool = FakePool(16)
    table = make_table(pool)
    run_turn(table, pool, ALICE, some_ids(16), now_s=0, nonce="a", ttl_s=10)
    system = blocks_of(table, ALICE)[:2]
    run_turn(table, pool, BOB, some_ids(16), now_s=0, nonce="b", ttl_s=20, shared=system)
    run_turn(table, pool, CAROL, some_ids(12), now_s=0, nonce="c", ttl_s=30, shared=system)
    assert table.num_reclaimable(now_s=1) == 7
    assert table.revoke(3, now_s=1) == 3
    assert blocks_of(table, ALICE) == system
    assert table.info(BOB, now_s=1).num_blocks == 3
    assert table.revoke(3, now_s=1) == 3
    assert [table.info(key, now_s=1).num_blocks for key in (ALICE, BOB, CAROL)] == [1, 1, 1]
    verify_references(table, pool)
    assert table.revoke(3, now_s=1) == 1
    assert pool.num_free_blocks() == 16


def test_blocks_under_a_ticket_are_not_reclaimable():
    """What a reader reads gives way to nobody, and its lease is not clipped for it."""
    pool = FakePool(16)
    table = make_table(pool)
    run_turn(table, pool, ALICE, some_ids(16), now_s=0, nonce="a")
    table.begin(ALICE, some_ids(10), "model-1", now_s=1, want_ticket=True, nonce="b")
    assert table.num_reclaimable(now_s=1) == 1
    assert table.revoke(4, now_s=1) == 1
    assert table.info(ALICE, now_s=1).num_blocks == 3


def test_a_question_can_stop_early():
    """Counting what is reclaimable ends at the given limit."""
    pool = FakePool(16)
    table = make_table(pool)
    run_turn(table, pool, ALICE, some_ids(24), now_s=0, nonce="a")
    assert [table.num_reclaimable(now_s=0, limit=limit) for limit in (None, 9, 6, 2, 0)] == [6, 6, 6, 2, 0]


@pytest.mark.parametrize(("num_blocks", "num_kept"), [(5, 6), (6, 6), (7, 6), (4, 2)])
def test_leases_are_not_revoked_in_vain(num_blocks, num_kept):
    """Where all leases together would not make room, and that was the condition, none is touched."""
    pool = FakePool(16)
    table = make_table(pool)
    run_turn(table, pool, ALICE, some_ids(24), now_s=0, nonce="a")
    request = pool.take(0, shared=blocks_of(table, ALICE)[:2])
    table.revoke(num_blocks, now_s=1, all_or_nothing=True)
    assert table.info(ALICE, now_s=1).num_blocks == num_kept
    pool.give_back(request)


@pytest.mark.parametrize("num_blocks", [0, -1])
def test_revoking_nothing_changes_nothing(num_blocks):
    """A need of zero blocks, or less, touches no lease."""
    pool = FakePool(16)
    table = make_table(pool)
    run_turn(table, pool, ALICE, some_ids(24), now_s=0, nonce="a")
    assert table.revoke(num_blocks, now_s=1) == 0
    assert table.info(ALICE, now_s=1).num_blocks == 6


def test_a_policy_decides_the_order():
    """Any order of leases can be given; the table only counts."""
    from server_ext.core.leases import LeaseTable

    from .fakes import make_settings

    pool = FakePool(16)
    table = LeaseTable(
        pool,
        make_settings(),
        block_size=4,
        max_request_blocks=8,
        new_ticket_id=str,
        order=lambda leases, now_s: sorted(leases, key=lambda lease: -len(lease.block_ids)),
    )
    keys = make_leases(pool, table, small=(1, 5), large=(4, 50))
    assert table.revoke(2, now_s=0) == 2
    assert table.info(keys["small"], now_s=0).num_blocks == 1
    assert table.info(keys["large"], now_s=0).num_blocks == 2
