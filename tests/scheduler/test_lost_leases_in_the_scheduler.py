"""Leases that are gone, and vLLM's own prefix cache: what is pinned again is what it was, or it is not pinned."""

import pytest

from .harness import BLOCK_SIZE, ids

PROMPT = ids(3 * BLOCK_SIZE + 4)
NO_TIME_S = 1e-9
NUM_BLOCKS = 20


@pytest.fixture
def d(make_harness):
    """A scheduler of D with 20 blocks: the longest request takes 16, tickets the rest."""
    return make_harness("decode", num_blocks=NUM_BLOCKS, budget_fraction=1.0)


def lose(d):
    """Run a turn whose lease expires at once; return its block ids."""
    begun = d.begin(PROMPT)
    request = d.add("lost", PROMPT, max_tokens=2, session_id=begun["nonce"])
    d.answer(d.step())
    (block_ids,) = d.scheduler.kv_cache_manager.get_block_ids("lost")
    block_ids = list(block_ids)
    d.run(request)
    d.settle(begun, request.all_token_ids, ttl_s=NO_TIME_S)
    assert d.control("get")["info"]["lease"]["state"] == "expired"
    assert d.num_free == NUM_BLOCKS
    return block_ids


def write(d, num_blocks):
    """Let two requests together write into as many blocks, and end."""
    for start, count in ((20_000, num_blocks // 2), (40_000, num_blocks - num_blocks // 2)):
        d.add(f"live{start}", ids(count * BLOCK_SIZE - 1, start), max_tokens=1)
    step = d.step()
    assert len(step.num_scheduled_tokens) == 2
    d.answer(step)


def come_back(d, *, want_ticket=True):
    """Begin the session's next turn."""
    return d.begin([*PROMPT, 1, 1, *ids(8, 7000)], turn=2, want_ticket=want_ticket)


def test_an_expired_lease_is_pinned_again_for_its_reader(d):
    """Its full blocks, the same ones, are on the ticket, and out of reach of other requests."""
    block_ids = lose(d)
    begun = come_back(d)
    assert (begun["held_tokens"], begun["matched_tokens"], begun["lease_reason"]) == (96, 96, "lease_expired")
    assert begun["ticket"]["remote_block_ids"] == [block_ids[:3]]
    write(d, NUM_BLOCKS - 3)
    assert [d.pool.blocks[block_id].ref_cnt for block_id in block_ids[:3]] == [2, 2, 2]
    d.control("return_ticket", ticket_id=begun["ticket_id"])
    d.control("abandon", nonce=begun["nonce"], return_ticket=True)
    d.control("release")
    assert d.num_free == NUM_BLOCKS


def test_what_other_requests_have_written_over_is_lost(d):
    """After a request that needed the whole pool nothing is left, and nothing is offered."""
    lose(d)
    write(d, NUM_BLOCKS)
    begun = come_back(d)
    assert (begun["held_tokens"], begun["ticket"], begun["lease_reason"]) == (0, None, "lease_expired")
    assert d.num_free == NUM_BLOCKS


def test_a_head_that_is_left_is_pinned_again(d):
    """A request takes the tail first, as it was given back first; the head is still a prefix."""
    block_ids = lose(d)
    write(d, NUM_BLOCKS - 2)
    assert come_back(d)["ticket"]["remote_block_ids"] == [block_ids[:2]]


def test_an_equal_prefix_that_is_only_being_computed_is_not_pinned(d):
    """VLLM names a block by what a step is going to write: an equal name is no proof, the same one is."""
    block_ids = lose(d)
    names = [d.pool.blocks[block_id].block_hash for block_id in block_ids[:3]]
    write(d, NUM_BLOCKS)
    # The same prompt is computed into the same blocks.
    d.pool.free_block_queue.prepend_n([take(d, block_id) for block_id in block_ids])
    again = d.add("again", PROMPT, max_tokens=1)
    step = d.step()
    assert list(d.scheduler.kv_cache_manager.get_block_ids("again")[0]) == block_ids
    assert [d.pool.blocks[block_id].block_hash for block_id in block_ids[:3]] == names
    assert come_back(d)["ticket"] is None
    d.answer(step)
    assert again.is_finished()


def take(d, block_id):
    """Take a free block out of the queue of free ones."""
    block = d.pool.blocks[block_id]
    d.pool.free_block_queue.remove(block)
    return block


def test_a_prefix_that_others_use_meanwhile_is_pinned_again(d):
    """A request that hits the lost blocks keeps them what they are."""
    block_ids = lose(d)
    d.add("live", [*PROMPT, 5], max_tokens=4)
    d.answer(d.step())
    assert come_back(d)["ticket"]["remote_block_ids"] == [block_ids[:3]]


def test_a_reset_of_the_prefix_cache_leaves_nothing(d):
    """What vLLM no longer believes of its blocks is not offered to a reader."""
    lose(d)
    assert d.scheduler.reset_prefix_cache()
    assert come_back(d)["ticket"] is None


def test_a_release_after_the_end_is_final(d):
    """Blocks whose owner has given them back are not pinned again, wherever they lie."""
    lose(d)
    d.control("release")
    begun = come_back(d)
    assert (begun["ticket"], begun["lease_reason"], d.num_free) == (None, "released", NUM_BLOCKS)
