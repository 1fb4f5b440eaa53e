"""Plans a revocation: the fewest blocks, from the tails of leases, that free as many as are needed.

`count_reclaimable` is the question, `plan_revocation` the answer; both change nothing.
"""

from collections import Counter
from collections.abc import Callable, Iterable

from .records import Lease


def plan_revocation(
    victims: Iterable[Lease], num_blocks: int, num_references: Callable[[int], int]
) -> list[tuple[Lease, int]]:
    """Return which leases to clip, and how many blocks each one keeps, to free `num_blocks` blocks.

    A clipped lease is still a prefix, so blocks go from the tail. A block is freed by the last of its
    references only: one that a request, a ticket or a spared lease holds too gains nothing, and no lease is
    clipped for it. Frees fewer blocks where the victims do not have as many. Changes nothing.

    Args:
        victims: what may be clipped, the first to give way first.
        num_blocks: how many blocks are missing, at least 1.
        num_references: all references on a block.
    """
    dropped: Counter[int] = Counter()
    freed: set[int] = set()
    visited: list[Lease] = []
    for victim in victims:
        if len(freed) >= num_blocks:
            break
        visited.append(victim)
        for block_id in reversed(victim.block_ids):
            dropped[block_id] += 1
            if dropped[block_id] == num_references(block_id):
                freed.add(block_id)
                if len(freed) == num_blocks:
                    break
    # What was visited without gain is spared: a lease ends at its first block that is freed.
    ends = (
        (victim, next((i for i, block_id in enumerate(victim.block_ids) if block_id in freed), None))
        for victim in visited
    )
    return [(victim, num_kept) for victim, num_kept in ends if num_kept is not None]


def count_reclaimable(
    leases: Iterable[Lease], num_references: Callable[[int], int], *, limit: int | None = None
) -> int:
    """Return how many blocks nothing but these leases holds; counts no further than `limit`.

    Args:
        leases: all that give way.
        num_references: all references on a block.
        limit: where enough is enough; None for an exact count, which looks at every block.
    """
    num_ours: Counter[int] = Counter()
    num_freed = 0
    for lease in leases:
        for block_id in lease.block_ids:
            if limit is not None and num_freed >= limit:
                return num_freed
            num_ours[block_id] += 1
            num_freed += num_ours[block_id] == num_references(block_id)
    return num_freed
