"""The multiset of blocks behind the budgets."""

from array import array
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from server_ext.core.ledger import BlockCounts

LEASES = st.lists(st.sets(st.integers(0, 12), max_size=8), max_size=8)


@given(held=LEASES, given_back=st.lists(st.integers(0, 7), unique=True))
def test_blocks_are_counted_like_in_any_multiset(held, given_back):
    """Whatever leases share, distinct blocks and membership are those of plain counting, down to nothing."""
    counts, expected = BlockCounts(), Counter()
    for blocks in held:
        counts.add(array("i", blocks))
        expected.update(blocks)
    for index in given_back:
        if index < len(held):
            counts.remove(array("i", held[index]))
            expected.subtract(held[index])
    alive = +expected
    assert len(counts) == len(alive)
    assert [block_id in counts for block_id in range(13)] == [block_id in alive for block_id in range(13)]
