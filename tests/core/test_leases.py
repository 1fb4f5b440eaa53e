"""The life of a lease, verb by verb."""

from array import array

import pytest

from server_ext.core.errors import InvalidRequest, LeaseLost, TurnConflict
from server_ext.core.metrics import CLIPS, REJECTIONS, STALE_READS, TICKET_REFUSALS, TICKETS, TURN_TIMEOUTS

from .fakes import (
    ALICE,
    BLOCK_SIZE,
    BOB,
    FakePool,
    blocks_of,
    make_table,
    run_turn,
    some_ids,
    verify_references,
)


def begin(table, key, ids, *, now_s, nonce="again", want_ticket=True, fingerprint="model-1"):
    """Begin a turn with a ticket wanted."""
    return table.begin(key, ids, fingerprint, now_s=now_s, want_ticket=want_ticket, nonce=nonce)


# ---------------------------------------------------------------- begin


def test_a_first_turn_finds_nothing():
    """The first turn of an unknown session has nothing held, nothing matched, and says `first_turn`."""
    begun = begin(make_table(FakePool()), ALICE, some_ids(10), now_s=0)
    assert (begun.held_tokens, begun.matched_tokens, begun.diverged_at) == (0, 0, None)
    assert (begun.lease_reason, begun.ticket, begun.ticket_reason) == ("first_turn", None, None)


def test_an_appended_prompt_matches_all_that_is_held():
    """A prompt that continues the history matches the whole lease, and the ticket covers just its blocks."""
    pool = FakePool()
    table = make_table(pool)
    run_turn(table, pool, ALICE, some_ids(10), now_s=0, nonce="a")
    begun = begin(table, ALICE, some_ids(20), now_s=1)
    assert (begun.held_tokens, begun.matched_tokens, begun.diverged_at) == (10, 10, None)
    assert begun.lease_reason is None
    assert begun.ticket.num_tokens == 10
    assert list(begun.ticket.block_ids) == blocks_of(table, ALICE)[:3]
    verify_references(table, pool)


def test_an_edited_prompt_matches_up_to_the_first_difference():
    """A prompt that leaves the history is matched, and fetched, only up to its first differing token."""
    pool = FakePool()
    table = make_table(pool)
    run_turn(table, pool, ALICE, some_ids(20), now_s=0, nonce="a")
    begun = begin(table, ALICE, some_ids(6) + some_ids(14, seed=1), now_s=1)
    assert (begun.held_tokens, begun.matched_tokens, begun.diverged_at) == (20, 6, 6)
    assert begun.ticket.num_tokens == 6
    assert len(begun.ticket.block_ids) == 2


def test_a_prompt_within_the_history_does_not_diverge():
    """A prompt that is itself a prefix of what is held matches as a whole, and the ticket covers all of it."""
    pool = FakePool()
    table = make_table(pool)
    run_turn(table, pool, ALICE, some_ids(20), now_s=0, nonce="a")
    begun = begin(table, ALICE, some_ids(8), now_s=1)
    assert (begun.matched_tokens, begun.diverged_at, begun.ticket.num_tokens) == (8, None, 8)


def test_a_different_first_token_opens_no_ticket():
    """Where nothing matches there is nothing to read, and the report says that token 0 differs."""
    pool = FakePool()
    table = make_table(pool)
    run_turn(table, pool, ALICE, some_ids(8), now_s=0, nonce="a")
    begun = begin(table, ALICE, some_ids(8, seed=1), now_s=1)
    assert (begun.matched_tokens, begun.diverged_at, begun.ticket, begun.ticket_reason) == (0, 0, None, None)


def test_another_model_matches_nothing():
    """Equal tokens of another model, weights version, adapter or salt have other KV: `model_changed`."""
    pool = FakePool()
    table = make_table(pool)
    run_turn(table, pool, ALICE, some_ids(8), now_s=0, nonce="a")
    begun = begin(table, ALICE, some_ids(12), now_s=1, fingerprint="model-2")
    assert (begun.held_tokens, begun.matched_tokens, begun.lease_reason) == (8, 0, "model_changed")
    assert begun.ticket is None


def test_another_tenants_session_of_the_same_id_is_another_session():
    """The key is (tenant, id): an id that another tenant uses finds nothing."""
    pool = FakePool()
    table = make_table(pool)
    run_turn(table, pool, ALICE, some_ids(8), now_s=0, nonce="a")
    assert begin(table, ("tenant-b", "alice"), some_ids(8), now_s=1).held_tokens == 0


def test_no_ticket_unless_wanted():
    """A turn that runs locally takes no ticket, whatever matches."""
    pool = FakePool()
    table = make_table(pool)
    run_turn(table, pool, ALICE, some_ids(8), now_s=0, nonce="a")
    begun = begin(table, ALICE, some_ids(12), now_s=1, want_ticket=False)
    assert (begun.matched_tokens, begun.ticket, begun.ticket_reason) == (8, None, None)


def test_too_few_tokens_are_not_worth_a_ticket():
    """Below the threshold the ticket is refused by name; at it, it is given."""
    pool = FakePool()
    table = make_table(pool, min_fetch_tokens=9)
    run_turn(table, pool, ALICE, some_ids(9), now_s=0, nonce="a")
    run_turn(table, pool, BOB, some_ids(8), now_s=0, nonce="b")
    assert begin(table, ALICE, some_ids(9), now_s=1, nonce="c").ticket is not None
    begun = begin(table, BOB, some_ids(12), now_s=1, nonce="d")
    assert (begun.ticket, begun.ticket_reason) == (None, "below_threshold")
    assert table.counts.get(TICKET_REFUSALS, "below_threshold") == 1


def test_tickets_leave_room_for_the_longest_request():
    """Tickets cannot be revoked, so one that left too few blocks for the longest request is refused."""
    pool = FakePool(16)
    table = make_table(pool, max_request_blocks=12)
    run_turn(table, pool, ALICE, some_ids(3 * BLOCK_SIZE), now_s=0, nonce="a")
    run_turn(table, pool, BOB, some_ids(2 * BLOCK_SIZE, seed=1), now_s=0, nonce="b")
    assert begin(table, ALICE, some_ids(12), now_s=1, nonce="c").ticket is not None
    begun = begin(table, BOB, some_ids(8, seed=1), now_s=1, nonce="d")
    assert (begun.matched_tokens, begun.ticket, begun.ticket_reason) == (8, None, "over_budget")
    table.abandon("d", return_ticket=True, now_s=1)
    assert begin(table, BOB, some_ids(4, seed=1), now_s=1, nonce="e").ticket is not None


def test_no_ticket_where_the_longest_request_needs_the_whole_pool():
    """A pool that just fits one longest request has no room for tickets at all."""
    pool = FakePool(8)
    table = make_table(pool, max_request_blocks=9)
    run_turn(table, pool, ALICE, some_ids(4), now_s=0, nonce="a")
    assert begin(table, ALICE, some_ids(4), now_s=1).ticket_reason == "over_budget"


def test_one_turn_of_a_session_at_a_time():
    """A second begin while a turn is open is a conflict that changes nothing."""
    pool = FakePool()
    table = make_table(pool)
    begin(table, ALICE, some_ids(8), now_s=0, nonce="a")
    with pytest.raises(TurnConflict) as caught:
        begin(table, ALICE, some_ids(8), now_s=1, nonce="b")
    assert caught.value.info.retry_after_s == 0.2
    assert table.is_open("a")
    assert not table.is_open("b")


def test_a_lease_does_not_expire_while_its_turn_runs():
    """A turn longer than the ttl keeps the lease it began with, until the turn itself times out."""
    pool = FakePool()
    table = make_table(pool, turn_timeout_s=100)
    run_turn(table, pool, ALICE, some_ids(8), now_s=0, nonce="a", ttl_s=10)
    begin(table, ALICE, some_ids(8), now_s=5, want_ticket=False)
    info = table.info(ALICE, now_s=104)
    assert (info.state, info.remaining_s) == ("active", 1)
    assert table.sweep(now_s=105) == 2
    assert not table.is_open("again")
    assert table.info(ALICE, now_s=105).state == "expired"
    assert pool.num_free_blocks() == pool.num_blocks


def test_a_lease_that_has_long_to_live_outlasts_a_turn_that_timed_out():
    """Giving up a turn ends the turn only; the lease goes on to its own deadline."""
    pool = FakePool()
    table = make_table(pool, turn_timeout_s=10, max_ttl_s=100)
    run_turn(table, pool, ALICE, some_ids(8), now_s=0, nonce="a", ttl_s=50)
    begin(table, ALICE, some_ids(8), now_s=1, want_ticket=False)
    assert table.sweep(now_s=11) == 1
    assert table.info(ALICE, now_s=11).remaining_s == 40
    assert table.counts.get(TURN_TIMEOUTS) == 1
    assert table.sweep(now_s=51) == 1


# ---------------------------------------------------------------- finish and settle


def test_a_settled_turn_holds_a_lease():
    """What the scheduler pinned becomes the lease, clipped to the tokens that the answer kept."""
    pool = FakePool()
    table = make_table(pool)
    info = run_turn(table, pool, ALICE, some_ids(18), num_kept=13, now_s=0, nonce="a", ttl_s=30)
    assert (info.state, info.remaining_s, info.num_tokens, info.num_blocks, info.reason) == (
        "active",
        30,
        13,
        4,
        None,
    )
    assert pool.num_free_blocks() == pool.num_blocks - 4
    verify_references(table, pool)


def test_no_more_is_leased_than_was_computed():
    """An answer may end in tokens whose KV is not computed yet; they are not leased."""
    pool = FakePool()
    table = make_table(pool)
    assert run_turn(table, pool, ALICE, some_ids(9), num_kept=12, now_s=0, nonce="a").num_tokens == 9


def test_finish_believes_the_smallest_of_its_numbers():
    """Tokens beyond the given blocks or ids are not pinned, and blocks beyond the tokens neither."""
    pool = FakePool()
    table = make_table(pool)
    block_ids = pool.take(5)
    begin(table, ALICE, some_ids(9), now_s=0, nonce="a")
    assert table.finish("a", block_ids[:2], 9, some_ids(9), now_s=0)
    begin(table, BOB, some_ids(9), now_s=0, nonce="b")
    assert table.finish("b", block_ids[2:], 9, some_ids(5), now_s=0)
    pool.give_back(block_ids)
    assert pool.num_free_blocks() == pool.num_blocks - 4
    assert table.settle("a", 9, ttl_s=None, now_s=0).num_tokens == 8
    assert table.settle("b", 9, ttl_s=None, now_s=0).num_tokens == 5
    assert pool.num_free_blocks() == pool.num_blocks - 4


def test_a_request_that_nobody_began_is_not_pinned():
    """Only the nonce of an open turn is leased: what a client sends as a session id reaches nothing."""
    pool = FakePool()
    table = make_table(pool)
    block_ids = pool.take(2)
    assert not table.finish("alice", block_ids, 8, some_ids(8), now_s=0)
    pool.give_back(block_ids)
    assert pool.num_free_blocks() == pool.num_blocks


@pytest.mark.parametrize("num_tokens", [0, -3])
def test_a_request_without_computed_tokens_leaves_the_old_lease(num_tokens):
    """A request that lost its blocks before it ended pins nothing; the old lease stays and says why."""
    pool = FakePool()
    table = make_table(pool)
    run_turn(table, pool, ALICE, some_ids(8), now_s=0, nonce="a", ttl_s=10)
    begin(table, ALICE, some_ids(8), now_s=5, nonce="b")
    assert not table.finish("b", [], num_tokens, some_ids(12), now_s=6)
    info = table.settle("b", 12, ttl_s=10, now_s=7)
    assert (info.state, info.num_tokens, info.reason, info.remaining_s) == ("active", 8, "lease_revoked", 10)


def test_a_first_turn_without_computed_tokens_says_that_they_were_taken():
    """Where no lease could be made, its state and the next turn say `lease_revoked`, not `first_turn`."""
    table = make_table(FakePool())
    begin(table, ALICE, some_ids(8), now_s=0, nonce="a")
    assert table.settle("a", 8, ttl_s=None, now_s=1).state == "revoked"
    assert begin(table, ALICE, some_ids(8), now_s=2).lease_reason == "lease_revoked"


def test_the_first_finish_of_a_turn_counts():
    """A second request under the same nonce replaces nothing."""
    pool = FakePool()
    table = make_table(pool)
    begin(table, ALICE, some_ids(8), now_s=0, nonce="a")
    block_ids = pool.take(4)
    assert table.finish("a", block_ids[:2], 8, some_ids(8), now_s=0)
    assert not table.finish("a", block_ids[2:], 8, some_ids(8), now_s=0)
    pool.give_back(block_ids)
    assert table.settle("a", 8, ttl_s=None, now_s=0).num_blocks == 2
    assert blocks_of(table, ALICE) == block_ids[:2]


def test_a_pin_that_is_not_settled_in_time_is_dropped():
    """Unsettled within seconds, a pin goes; the old lease stays, and a late settle keeps it."""
    pool = FakePool()
    table = make_table(pool, provisional_ttl_s=5)
    run_turn(table, pool, ALICE, some_ids(8), now_s=0, nonce="a", ttl_s=60)
    begin(table, ALICE, some_ids(8), now_s=1, nonce="b")
    block_ids = pool.take(4)
    table.finish("b", block_ids, 16, some_ids(16), now_s=2)
    pool.give_back(block_ids)
    assert table.sweep(now_s=7) == 1
    assert pool.num_free_blocks() == pool.num_blocks - 2
    info = table.settle("b", 16, ttl_s=60, now_s=8)
    assert (info.state, info.num_tokens, info.reason) == ("active", 8, "lease_expired")


def test_a_first_turn_settled_too_late_says_expired():
    """Without an older lease, a dropped pin leaves the session with an expired one."""
    pool = FakePool()
    table = make_table(pool, provisional_ttl_s=5)
    begin(table, ALICE, some_ids(8), now_s=0, nonce="a")
    block_ids = pool.take(2)
    table.finish("a", block_ids, 8, some_ids(8), now_s=0)
    pool.give_back(block_ids)
    info = table.settle("a", 8, ttl_s=60, now_s=5)
    assert (info.state, info.reason) == ("expired", "lease_expired")


def test_a_turn_of_which_nothing_is_kept_leaves_the_old_lease():
    """Kept == 0 drops the pin, and the previous lease stays as it was, renewed."""
    pool = FakePool()
    table = make_table(pool)
    run_turn(table, pool, ALICE, some_ids(8), now_s=0, nonce="a", ttl_s=60)
    info = run_turn(table, pool, ALICE, some_ids(16), now_s=10, nonce="b", num_kept=0, ttl_s=60)
    assert (info.state, info.num_tokens, info.remaining_s, info.reason) == ("active", 8, 60, None)
    verify_references(table, pool)


def test_the_next_turn_supersedes_the_lease():
    """A new lease replaces the old one, whose blocks it does not share return to the pool."""
    pool = FakePool()
    table = make_table(pool)
    run_turn(table, pool, ALICE, some_ids(10), now_s=0, nonce="a", ttl_s=100)
    old = blocks_of(table, ALICE)
    info = run_turn(table, pool, ALICE, some_ids(20), now_s=1, nonce="b", ttl_s=5, shared=old[:2])
    assert (info.num_tokens, info.num_blocks, info.remaining_s) == (20, 5, 5)
    assert pool.num_references(old[2]) == 0
    assert pool.num_free_blocks() == pool.num_blocks - 5
    assert table.num_leased_blocks == 5
    assert table.sweep(now_s=6) == 1
    assert pool.num_free_blocks() == pool.num_blocks


def test_the_references_of_the_old_lease_go_last():
    """Superseding never frees a block that the new lease holds too, not even for a moment."""
    pool = FakePool()
    table = make_table(pool)
    run_turn(table, pool, ALICE, some_ids(8), now_s=0, nonce="a")
    old = blocks_of(table, ALICE)
    seen = []
    pool_unpin = pool.unpin
    pool.unpin = lambda ids: (pool_unpin(ids), seen.append([pool.num_references(b) for b in old]))
    run_turn(table, pool, ALICE, some_ids(12), now_s=0, nonce="b", shared=old)
    assert all(count > 0 for counts in seen for count in counts)


def test_blocks_go_back_from_the_tail():
    """The head of a lease is what others may still reuse, so its tail is evicted first."""
    pool = FakePool(4)
    table = make_table(pool)
    run_turn(table, pool, ALICE, some_ids(16), now_s=0, nonce="a")
    held = blocks_of(table, ALICE)
    table.release(ALICE, now_s=1)
    assert list(pool.free) == held[::-1]


def test_ids_that_are_equal_are_kept_once():
    """A session's own copy of the ids is shared where it says the same, and ignored where it does not."""
    pool = FakePool()
    for other, is_shared in ((some_ids(10), True), (some_ids(10, seed=1), False)):
        from array import array

        table = make_table(pool)
        ids = array("i", other)
        begin(table, ALICE, some_ids(8), now_s=0, nonce="a")
        block_ids = pool.take(2)
        table.finish("a", block_ids, 8, some_ids(8), now_s=0)
        pool.give_back(block_ids)
        table.settle("a", 10, ttl_s=None, now_s=0, token_ids=ids)
        (lease,) = table.holdings()
        assert (lease.token_ids is ids) == is_shared
        assert begin(table, ALICE, some_ids(9), now_s=0).matched_tokens == 8
        table.release(ALICE, now_s=0)


def test_settling_an_unknown_turn_is_a_conflict():
    """A turn that was ended or given up cannot be settled."""
    with pytest.raises(TurnConflict, match="'x' is not open"):
        make_table(FakePool()).settle("x", 8, ttl_s=None, now_s=0)


# ---------------------------------------------------------------- budgets


def test_over_the_budget_a_lease_is_clipped_to_whole_blocks():
    """A lease that does not fit in the budget keeps its head, and says `over_budget`."""
    pool = FakePool(20)
    table = make_table(pool, budget_fraction=0.5)
    run_turn(table, pool, ALICE, some_ids(7 * BLOCK_SIZE), now_s=0, nonce="a")
    info = run_turn(table, pool, BOB, some_ids(18, seed=1), now_s=0, nonce="b")
    assert (info.state, info.num_blocks, info.num_tokens, info.reason) == ("active", 3, 12, "over_budget")
    assert table.num_leased_blocks == 10
    assert table.counts.get(CLIPS, "over_budget") == 1
    verify_references(table, pool)


def test_over_the_budget_a_lease_is_rejected():
    """With no block left in the budget there is no lease; the turn and the next one say why."""
    pool = FakePool(8)
    table = make_table(pool, budget_fraction=0.5)
    run_turn(table, pool, ALICE, some_ids(4 * BLOCK_SIZE), now_s=0, nonce="a")
    info = run_turn(table, pool, BOB, some_ids(8, seed=1), now_s=0, nonce="b")
    assert (info.state, info.num_blocks, info.remaining_s, info.reason) == ("none", 0, 0, "over_budget")
    assert begin(table, BOB, some_ids(8, seed=1), now_s=0).lease_reason == "over_budget"
    assert table.counts.get(REJECTIONS, "over_budget") == 1


def test_a_shared_block_costs_its_budget_once():
    """The budget counts distinct blocks, so sessions on one system prompt share its price."""
    pool = FakePool(8)
    table = make_table(pool, budget_fraction=0.5)
    run_turn(table, pool, ALICE, some_ids(12), now_s=0, nonce="a")
    info = run_turn(table, pool, BOB, some_ids(16), now_s=0, nonce="b", shared=blocks_of(table, ALICE))
    assert (info.num_blocks, info.reason, table.num_leased_blocks) == (4, None, 4)
    table.release(ALICE, now_s=0)
    assert table.num_leased_blocks == 4


def test_a_tenant_has_its_share_only():
    """One tenant cannot take the whole budget, and what it may not take is there for another one."""
    pool = FakePool(20)
    table = make_table(pool, tenant_share=0.4)
    info = run_turn(table, pool, ALICE, some_ids(40), now_s=0, nonce="a")
    assert (info.num_blocks, info.reason) == (8, "over_budget")
    assert run_turn(table, pool, BOB, some_ids(24, seed=1), now_s=0, nonce="b").reason is None


def test_a_superseded_lease_makes_room_for_its_successor():
    """The old lease's blocks are out of the budget when the new one is measured."""
    pool = FakePool(20)
    table = make_table(pool, budget_fraction=0.5)
    run_turn(table, pool, ALICE, some_ids(40), now_s=0, nonce="a")
    info = run_turn(table, pool, ALICE, some_ids(40, seed=1), now_s=0, nonce="b")
    assert (info.num_blocks, info.reason) == (10, None)


def test_an_expired_lease_makes_room_for_others():
    """Before the budget is measured, what has expired is gone."""
    pool = FakePool(8)
    table = make_table(pool, budget_fraction=0.5)
    run_turn(table, pool, ALICE, some_ids(16), now_s=0, nonce="a", ttl_s=5)
    info = run_turn(table, pool, BOB, some_ids(16, seed=1), now_s=5, nonce="b")
    assert (info.num_blocks, info.reason) == (4, None)


# ---------------------------------------------------------------- abandon and tickets


def test_an_abandoned_turn_leaves_everything_as_it_was():
    """The pin of a failed turn is dropped, the previous lease stays and is renewed by its own ttl."""
    pool = FakePool()
    table = make_table(pool)
    run_turn(table, pool, ALICE, some_ids(8), now_s=0, nonce="a", ttl_s=20)
    begin(table, ALICE, some_ids(12), now_s=15, nonce="b", want_ticket=False)
    block_ids = pool.take(3)
    table.finish("b", block_ids, 12, some_ids(12), now_s=50)
    pool.give_back(block_ids)
    assert table.abandon("b", return_ticket=True, now_s=50)
    info = table.info(ALICE, now_s=50)
    assert (info.num_tokens, info.remaining_s, info.reason) == (8, 20, None)
    assert pool.num_free_blocks() == pool.num_blocks - 2
    assert not table.abandon("b", return_ticket=True, now_s=50)


@pytest.mark.parametrize("return_ticket", [True, False])
def test_an_abandoned_turns_ticket_stays_while_its_reader_may_read(return_ticket):
    """Abandoning returns the ticket only where the caller knows that nobody reads any more."""
    pool = FakePool()
    table = make_table(pool)
    run_turn(table, pool, ALICE, some_ids(8), now_s=0, nonce="a")
    begin(table, ALICE, some_ids(8), now_s=1, nonce="b")
    table.abandon("b", return_ticket=return_ticket, now_s=2)
    assert table.pool(now_s=2).pending_ticket_blocks == (0 if return_ticket else 2)
    verify_references(table, pool)


def test_abandoning_without_a_ticket_returns_none():
    """A turn that never had a ticket can be abandoned all the same."""
    table = make_table(FakePool())
    begin(table, ALICE, some_ids(8), now_s=0, nonce="a")
    assert table.abandon("a", return_ticket=True, now_s=0)


def test_a_ticket_is_returned_once():
    """Returning a ticket is idempotent, and unknown ids are nothing special."""
    pool = FakePool()
    table = make_table(pool)
    run_turn(table, pool, ALICE, some_ids(8), now_s=0, nonce="a")
    ticket = begin(table, ALICE, some_ids(8), now_s=1).ticket
    assert table.return_ticket(ticket.ticket_id, now_s=2)
    assert not table.return_ticket(ticket.ticket_id, now_s=2)
    assert not table.return_ticket("t999", now_s=2)
    verify_references(table, pool)


def test_a_ticket_ends_at_its_deadline_and_grace():
    """A ticket that nobody returns is held for its reader until its deadline, and a little longer."""
    pool = FakePool()
    table = make_table(pool, ticket_ttl_s=30, ticket_grace_s=5)
    run_turn(table, pool, ALICE, some_ids(8), now_s=0, nonce="a")
    ticket = begin(table, ALICE, some_ids(8), now_s=1, nonce="b").ticket
    assert ticket.deadline_s == 31
    table.abandon("b", return_ticket=False, now_s=1)
    table.release(ALICE, now_s=1)
    assert table.pool(now_s=35.9).free_blocks == pool.num_blocks - 2
    assert table.pool(now_s=36).free_blocks == pool.num_blocks
    assert table.counts.get(TICKETS, "expired") == 1


@pytest.mark.parametrize(
    ("read_age_s", "num_stale"),
    [(None, 0), (4.1, 0), (4.0, 1), (0.0, 1)],
    ids=["unused", "early", "at the end", "late"],
)
def test_a_read_that_outlasted_its_blocks_is_counted(read_age_s, num_stale):
    """A read that was used and ended when the blocks were anyone's is stale; one that is only reported late is not."""
    pool = FakePool()
    table = make_table(pool, ticket_ttl_s=30, ticket_grace_s=5)
    run_turn(table, pool, ALICE, some_ids(8), now_s=0, nonce="a")
    ticket = begin(table, ALICE, some_ids(8), now_s=1, nonce="b").ticket
    for _ in range(2):
        assert not table.return_ticket(ticket.ticket_id, now_s=40, read_age_s=read_age_s)
        assert table.counts.get(STALE_READS) == num_stale
    assert not table.return_ticket("t999", now_s=40, read_age_s=0)
    assert table.counts.get(STALE_READS) == num_stale


def test_only_the_last_expired_tickets_are_remembered():
    """Tickets that nobody ever returns leave no more than a bounded memory of them."""
    pool = FakePool()
    table = make_table(pool, ticket_ttl_s=30, ticket_grace_s=5)
    run_turn(table, pool, ALICE, some_ids(8), now_s=0, nonce="a", ttl_s=900)
    for i in range(1100):
        begin(table, ALICE, some_ids(8), now_s=i / 10, nonce=f"b{i}")
        table.abandon(f"b{i}", return_ticket=False, now_s=i / 10)
    table.sweep(now_s=500)
    assert table.counts.get(TICKETS, "expired") == 1100
    for ticket_id in ("t99", "t100"):
        table.return_ticket(ticket_id, now_s=500, read_age_s=0)
    assert table.counts.get(STALE_READS) == 1


def test_a_late_note_does_not_hide_a_stale_read():
    """A reader's note behind the deadline says nothing of time; the conductor's return still does."""
    pool = FakePool()
    table = make_table(pool, ticket_ttl_s=30, ticket_grace_s=5)
    run_turn(table, pool, ALICE, some_ids(8), now_s=0, nonce="a", ttl_s=900)
    ticket = begin(table, ALICE, some_ids(8), now_s=0, nonce="b").ticket
    assert not table.return_ticket(ticket.ticket_id, now_s=40)
    assert table.counts.get(STALE_READS) == 0
    assert not table.return_ticket(ticket.ticket_id, now_s=41, read_age_s=1)
    assert table.counts.get(STALE_READS) == 1


def test_nothing_is_freed_under_an_open_ticket():
    """Release, expiry, revocation and forgetting leave a reader its blocks."""
    pool = FakePool(8)
    table = make_table(pool, max_request_blocks=4, ticket_ttl_s=500)
    run_turn(table, pool, ALICE, some_ids(16), now_s=0, nonce="a", ttl_s=10)
    ticket = begin(table, ALICE, some_ids(16), now_s=1, nonce="b").ticket
    assert table.revoke(8, now_s=1) == 0
    table.release(ALICE, now_s=2)
    table.forget(ALICE, now_s=3)
    assert pool.num_free_blocks() == 4
    assert all(pool.num_references(block_id) == 1 for block_id in ticket.block_ids)
    assert table.return_ticket(ticket.ticket_id, now_s=100)
    assert pool.num_free_blocks() == 8


def test_a_lease_can_be_read_again_and_again():
    """A ticket does not consume the lease: a retry gets another one."""
    pool = FakePool()
    table = make_table(pool)
    run_turn(table, pool, ALICE, some_ids(8), now_s=0, nonce="a")
    first = begin(table, ALICE, some_ids(8), now_s=1, nonce="b").ticket
    table.abandon("b", return_ticket=False, now_s=1)
    second = begin(table, ALICE, some_ids(8), now_s=2, nonce="c").ticket
    assert first.ticket_id != second.ticket_id
    assert list(first.block_ids) == list(second.block_ids)
    assert table.pool(now_s=2).pending_ticket_blocks == 2


# ---------------------------------------------------------------- extend, release, forget


def test_extend_never_shortens():
    """Extending by less than what remains changes nothing; by more, it moves the deadline."""
    pool = FakePool()
    table = make_table(pool)
    run_turn(table, pool, ALICE, some_ids(8), now_s=0, nonce="a", ttl_s=100)
    assert table.extend(ALICE, 5, now_s=10).remaining_s == 90
    assert table.extend(ALICE, 200, now_s=10).remaining_s == 200
    assert table.sweep(now_s=209) == 0
    assert table.sweep(now_s=210) == 1


def test_extend_is_cut_to_the_maximum():
    """Nobody can ask for more than the longest life, also not for ever so much."""
    pool = FakePool()
    table = make_table(pool, max_ttl_s=120)
    run_turn(table, pool, ALICE, some_ids(8), now_s=0, nonce="a", ttl_s=10**400)
    assert table.info(ALICE, now_s=0).remaining_s == 120
    assert table.extend(ALICE, 1e9, now_s=20).remaining_s == 120
    assert table.extend(ALICE, None, now_s=100).remaining_s == 60


@pytest.mark.parametrize("ttl_s", [0, -1, float("nan"), float("inf"), "60", True, [60]])
def test_a_bad_ttl_is_refused_by_name(ttl_s):
    """A ttl that is no positive finite number is an invalid request that changes nothing."""
    pool = FakePool()
    table = make_table(pool)
    begin(table, ALICE, some_ids(8), now_s=0, nonce="a")
    for verb in (
        lambda: table.settle("a", 8, ttl_s=ttl_s, now_s=0),
        lambda: table.extend(ALICE, ttl_s, now_s=0),
    ):
        with pytest.raises(InvalidRequest, match="ttl_s is") as caught:
            verb()
        assert caught.value.info.param == "ttl_s"
    assert table.is_open("a")


def test_extending_a_lease_that_is_gone_says_why():
    """An extend without a lease raises with the reason: before the first turn, expired, released."""
    pool = FakePool()
    table = make_table(pool)
    for now_s, reason in ((0, "first_turn"), (60, "lease_expired"), (61, "released")):
        with pytest.raises(LeaseLost) as caught:
            table.extend(ALICE, 10, now_s=now_s)
        assert caught.value.info.reason == reason
        if now_s == 0:
            run_turn(table, pool, ALICE, some_ids(8), now_s=0, nonce="a", ttl_s=60)
        table.release(ALICE, now_s=now_s) if now_s else None


def test_release_gives_the_blocks_back_and_is_idempotent():
    """After release the pool has its blocks again, and the next turn says `released`."""
    pool = FakePool()
    table = make_table(pool)
    run_turn(table, pool, ALICE, some_ids(8), now_s=0, nonce="a")
    for _ in range(2):
        info = table.release(ALICE, now_s=1)
        assert (info.state, info.remaining_s, info.num_tokens, info.reason) == ("released", 0, 0, "released")
    assert pool.num_free_blocks() == pool.num_blocks
    assert begin(table, ALICE, some_ids(8), now_s=2).lease_reason == "released"


def test_releasing_what_never_was_changes_nothing():
    """A session without a finished turn, known or not, has nothing to release and keeps state `none`."""
    table = make_table(FakePool())
    assert table.release(ALICE, now_s=0).state == "none"
    begin(table, ALICE, some_ids(8), now_s=0)
    assert (table.release(ALICE, now_s=0).state, table.release(ALICE, now_s=0).reason) == ("none", None)


def test_release_during_a_turn_speaks_of_what_is_held_now():
    """A running turn survives the release of the old lease, and its end makes a new one."""
    pool = FakePool()
    table = make_table(pool)
    run_turn(table, pool, ALICE, some_ids(8), now_s=0, nonce="a")
    begin(table, ALICE, some_ids(12), now_s=1, nonce="b", want_ticket=False)
    block_ids = pool.take(3)
    table.finish("b", block_ids, 12, some_ids(12), now_s=1)
    pool.give_back(block_ids)
    assert table.release(ALICE, now_s=1).state == "released"
    assert pool.num_free_blocks() == pool.num_blocks - 3
    info = table.settle("b", 12, ttl_s=None, now_s=2)
    assert (info.state, info.num_tokens, info.reason) == ("active", 12, None)


def test_forget_leaves_no_trace():
    """A forgotten session's lease, open turn and reasons are gone; its next turn is a first one."""
    pool = FakePool()
    table = make_table(pool)
    run_turn(table, pool, ALICE, some_ids(8), now_s=0, nonce="a")
    begin(table, ALICE, some_ids(12), now_s=1, nonce="b", want_ticket=False)
    block_ids = pool.take(3)
    table.finish("b", block_ids, 12, some_ids(12), now_s=1)
    pool.give_back(block_ids)
    table.forget(ALICE, now_s=2)
    table.forget(ALICE, now_s=2)
    assert pool.num_free_blocks() == pool.num_blocks
    assert not table.is_open("b")
    assert begin(table, ALICE, some_ids(8), now_s=3).lease_reason == "first_turn"


# ---------------------------------------------------------------- sweep


def test_one_sweep_reclaims_every_expired_lease_whatever_its_place():
    """A lease that was renewed in time does not shield 1,000 that were due after it (a stock reaper's bug)."""
    pool = FakePool(1001)
    table = make_table(pool)
    run_turn(table, pool, ("t", "long"), some_ids(4), now_s=0, nonce="long", ttl_s=0.9)
    for i in range(1000):
        run_turn(table, pool, ("t", str(i)), some_ids(4), now_s=0, nonce=str(i), ttl_s=1 + i % 7)
    table.extend(("t", "long"), 900, now_s=0.5)
    assert table.sweep(now_s=8) == 1000
    assert pool.num_free_blocks() == 1000
    assert table.info(("t", "long"), now_s=8).state == "active"
    assert table.sweep(now_s=8) == 0


def test_every_verb_sees_the_world_after_the_sweep():
    """No timer runs: each verb first ends what is due, so none acts on a lease that has expired."""
    pool = FakePool()
    for verb in (
        lambda table: table.info(BOB, now_s=60),
        lambda table: table.pool(now_s=60),
        lambda table: table.begin(BOB, [1], "m", now_s=60, want_ticket=False, nonce="x"),
        lambda table: table.finish("x", [], 0, [], now_s=60),
        lambda table: table.abandon("x", return_ticket=True, now_s=60),
        lambda table: table.return_ticket("x", now_s=60),
        lambda table: table.release(BOB, now_s=60),
        lambda table: table.forget(BOB, now_s=60),
        lambda table: table.num_reclaimable(now_s=60),
        lambda table: table.revoke(1, now_s=60),
        lambda table: table.release_all("reset", now_s=60),
        lambda table: table.has_tickets(now_s=60),
    ):
        table = make_table(pool)
        run_turn(table, pool, ALICE, some_ids(8), now_s=0, nonce="a", ttl_s=60)
        verb(table)
        assert pool.num_free_blocks() == pool.num_blocks


def test_renewing_for_ever_costs_no_memory():
    """Leases that are superseded or renewed many times leave nothing behind in the queue of deadlines."""
    pool = FakePool()
    table = make_table(pool)
    for i in range(2000):
        run_turn(table, pool, ALICE, some_ids(4), now_s=i / 100, nonce=str(i), ttl_s=900)
        table.extend(ALICE, 900, now_s=i / 100)
    assert len(table._held._deadlines) < 200  # noqa: SLF001 (what a leak would look like from outside is memory)
    assert pool.num_free_blocks() == pool.num_blocks - 1


# ---------------------------------------------------------------- forks and rewinds

CHILD = (ALICE[0], "child")


def test_a_child_holds_the_parents_blocks_by_itself():
    """Forking copies nothing and costs nothing; whoever ends first, the other keeps all that it holds."""
    pool = FakePool()
    table = make_table(pool, budget_fraction=0.1)
    run_turn(table, pool, ALICE, some_ids(22), now_s=0, nonce="a", ttl_s=30)
    info = table.fork(ALICE, CHILD, array("i", some_ids(22)), ttl_s=None, now_s=10)
    assert (info.state, info.num_tokens, info.num_blocks, info.remaining_s) == ("active", 22, 6, 30)
    assert blocks_of(table, CHILD) == blocks_of(table, ALICE)
    assert table.num_leased_blocks == 6 == 64 - pool.num_free_blocks()
    table.release(ALICE, now_s=11)
    assert table.num_leased_blocks == 6
    table.fork(CHILD, ALICE, array("i"), ttl_s=100, now_s=12)
    table.release(CHILD, now_s=13)
    assert table.info(ALICE, now_s=13).remaining_s == 99
    table.release(ALICE, now_s=14)
    assert (table.num_leased_blocks, pool.num_free_blocks()) == (0, 64)


def test_a_child_of_an_earlier_turn_holds_as_much_as_it_has():
    """The child's lease ends where its history does, within a block too, and is whole for it."""
    pool = FakePool()
    table = make_table(pool)
    run_turn(table, pool, ALICE, some_ids(22), now_s=0, nonce="a")
    table.revoke(1, now_s=0)
    assert table.info(ALICE, now_s=0).reason == "lease_revoked"
    info = table.fork(ALICE, CHILD, array("i", some_ids(9)), ttl_s=5, now_s=0)
    assert (info.num_tokens, info.num_blocks, info.remaining_s, info.reason) == (9, 3, 5, None)
    assert blocks_of(table, CHILD) == blocks_of(table, ALICE)[:3]
    begun = begin(table, CHILD, some_ids(12), now_s=1, nonce="c")
    assert (begun.held_tokens, begun.matched_tokens, begun.ticket.num_tokens) == (9, 9, 9)


@pytest.mark.parametrize("history", [[], [7, 8, 9]])
def test_a_child_of_an_unknown_or_foreign_history(history):
    """Without ids the child holds all that the parent does, for its next prompt to match; with others nothing."""
    pool = FakePool()
    table = make_table(pool)
    run_turn(table, pool, ALICE, some_ids(8), now_s=0, nonce="a")
    info = table.fork(ALICE, CHILD, array("i", history), ttl_s=None, now_s=0)
    assert (info.state, info.num_tokens) == (("none", 0) if history else ("active", 8))


def test_a_child_of_a_parent_without_a_lease_says_why():
    """What the parent lost the child never had, for the same reason; a parent without turns tells nothing."""
    pool = FakePool()
    table = make_table(pool)
    assert table.fork(ALICE, CHILD, array("i"), ttl_s=None, now_s=0).state == "none"
    run_turn(table, pool, ALICE, some_ids(8), now_s=0, nonce="a", ttl_s=5)
    info = table.fork(ALICE, CHILD, array("i", some_ids(8)), ttl_s=None, now_s=6)
    assert (info.state, info.reason) == ("expired", "lease_expired")
    assert begin(table, CHILD, some_ids(9), now_s=6, nonce="c").lease_reason == "lease_expired"


def test_children_grow_tails_of_their_own():
    """After their turns parent and children hold the shared blocks once, and each its own tail."""
    pool = FakePool()
    table = make_table(pool, budget_fraction=0.5, tenant_share=0.5)
    run_turn(table, pool, ALICE, some_ids(40), now_s=0, nonce="a")
    keys = [(ALICE[0], str(i)) for i in range(6)]
    for i, key in enumerate(keys):
        table.fork(ALICE, key, array("i", some_ids(40)), ttl_s=None, now_s=0)
        shared = blocks_of(table, key)
        run_turn(table, pool, key, some_ids(40) + some_ids(4, seed=i + 1), now_s=1, nonce=str(i), shared=shared)
    assert table.num_leased_blocks == 16 == 64 - pool.num_free_blocks()
    for key in [ALICE, *keys[1:]]:
        table.release(key, now_s=2)
    assert table.num_leased_blocks == 11 == 64 - pool.num_free_blocks()


def test_a_rewound_lease_gives_its_tail_back():
    """Blocks behind the history go, and the lease is whole; what is not known or not in common changes nothing."""
    pool = FakePool()
    table = make_table(pool)
    run_turn(table, pool, ALICE, some_ids(22), now_s=0, nonce="a")
    table.revoke(1, now_s=0)
    for history in ([], [7]):
        assert table.rewind(ALICE, array("i", history), now_s=0).num_tokens == 20
    info = table.rewind(ALICE, array("i", some_ids(6)), now_s=0)
    assert (info.state, info.num_tokens, info.num_blocks, info.reason) == ("active", 6, 2, None)
    assert pool.num_free_blocks() == 62
    assert table.rewind(BOB, array("i", [1]), now_s=0).state == "none"


# ---------------------------------------------------------------- release all


@pytest.mark.parametrize("reason", ["reset", "model_changed"])
def test_release_all_takes_every_lease_and_pin_and_leaves_the_tickets(reason):
    """Leases have references of their own: they end with the reason, whoever reads, and a ticket ends by itself."""
    pool = FakePool()
    table = make_table(pool)
    run_turn(table, pool, ALICE, some_ids(8), now_s=0, nonce="a")
    run_turn(table, pool, BOB, some_ids(8, seed=1), now_s=0, nonce="b")
    ticket = begin(table, ALICE, some_ids(8), now_s=1, nonce="c").ticket
    begin(table, BOB, some_ids(8, seed=1), now_s=1, nonce="d", want_ticket=False)
    block_ids = pool.take(2)
    table.finish("d", block_ids, 8, some_ids(8, seed=1), now_s=1)
    pool.give_back(block_ids)
    assert table.has_tickets(now_s=2)
    table.release_all(reason, now_s=2)
    assert list(table.holdings()) == [ticket]
    verify_references(table, pool)
    assert pool.num_free_blocks() == pool.num_blocks - 2
    assert (table.info(ALICE, now_s=2).state, table.info(ALICE, now_s=2).reason) == ("revoked", reason)
    assert table.return_ticket(ticket.ticket_id, now_s=3)
    assert not table.has_tickets(now_s=3)
    assert pool.num_free_blocks() == pool.num_blocks
    info = table.settle("d", 8, ttl_s=None, now_s=3)
    assert (info.state, info.reason) == ("revoked", reason)


def test_a_ticket_that_is_never_returned_stands_in_the_way_until_its_deadline():
    """What a cache reset waits for ends by itself."""
    pool = FakePool()
    table = make_table(pool)
    run_turn(table, pool, ALICE, some_ids(8), now_s=0, nonce="a")
    ticket = begin(table, ALICE, some_ids(8), now_s=1).ticket
    assert table.has_tickets(now_s=ticket.deadline_s)
    assert not table.has_tickets(now_s=ticket.due_s)


def test_release_all_works_from_a_session_that_holds_nothing():
    """With nothing held there is nothing to take, and nothing in the way of a reset."""
    pool = FakePool()
    table = make_table(pool)
    assert not table.has_tickets(now_s=0)
    table.release_all("reset", now_s=0)
    assert pool.num_free_blocks() == pool.num_blocks
