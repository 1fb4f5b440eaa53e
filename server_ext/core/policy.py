"""Which lease gives way first under memory pressure. Policies decide, the table counts.

What the table itself sees to, whatever the policy: nothing waits here that was superseded (a turn's lease replaces
the one before at once), what has expired is given back before any policy is asked, leases of running turns come
after all others, and only what frees a block is taken. A policy is any callable like `RevocationOrder`; two are
here, and the setting `revocation` chooses.
"""

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from heapq import heapify, heappop, heapreplace
from operator import attrgetter
from typing import Final, Protocol

from .gaps import GapModel
from .rates import Rates
from .records import Key, Lease

# Under pressure every step may revoke, and what a lease is worth changes by the second.
_MAX_AGE_S: Final = 1.0


class RevocationOrder(Protocol):
    """An order of revocation."""

    def __call__(self, leases: Iterable[Lease], *, now_s: float) -> Iterable[Lease]:
        """Return all of `leases`, the first to be revoked first, and change none.

        The table takes them only as far as it must, and keeps those of running turns for the end.
        """
        ...


def least_remaining_first(leases: Iterable[Lease], *, now_s: float) -> list[Lease]:  # noqa: ARG001 (protocol)
    """Order by remaining time: the lease that its owner renewed last, or for longest, is kept longest.

    It needs no knowledge of what a lease is worth. Sorting is cheap, for leases come in about this order
    already.
    """
    return sorted(leases, key=attrgetter("due_s"))


class LeastValueFirst:
    """Orders by value per exclusive block: what revoking loses for each block that it gains.

    The value is the time to compute again what lies in the exclusive blocks, those that nobody else holds, times the
    chance that the session returns before its lease ends. A lease without such blocks comes last.

    Counting exclusive blocks takes longer than the rest, so a lease is ranked by its value per block first, which is
    never more, and by that per exclusive block once it is its turn. Values are kept for a second.

    Args:
        gaps: how likely sessions return.
        rates: what computing takes.
        num_references: all references on a block.
        block_size: tokens per block.
    """

    def __init__(self, gaps: GapModel, rates: Rates, num_references: Callable[[int], int], *, block_size: int) -> None:
        self._gaps = gaps
        self._rates = rates
        self._num_references = num_references
        self._block_size = block_size
        self._chances: dict[Key, tuple[float, float]] = {}
        self._chances_s = -math.inf

    def __call__(self, leases: Iterable[Lease], *, now_s: float) -> Iterator[Lease]:
        """Yield `leases`, the one with the least value per exclusive block first, in O(1) each after O(leases)."""
        chances = self._chances
        if not 0 <= now_s - self._chances_s < _MAX_AGE_S:
            chances.clear()
            self._chances_s = now_s
        prefill_s, block_size = self._rates.prefill_s, self._block_size
        ranked = []
        for index, lease in enumerate(leases):
            due_s, chance = chances.get(lease.key, (None, 0.0))
            if due_s != lease.due_s:
                chance = self._gaps.return_chance(lease.key, lease.due_s, now_s=now_s)
                chances[lease.key] = lease.due_s, chance
            num_blocks = len(lease.block_ids)
            least = chance * prefill_s(num_blocks * block_size) / num_blocks
            # At equal value the one that ends first; the index keeps leases from being compared.
            ranked.append((least, lease.due_s, index, lease, False))
        heapify(ranked)
        while ranked:
            _, due_s, index, lease, is_exact = ranked[0]
            if is_exact:
                yield heappop(ranked)[3]
            else:
                heapreplace(ranked, (self._value(lease, chances[lease.key][1]), due_s, index, lease, True))

    def _value(self, lease: Lease, chance: float) -> float:
        # All that holds blocks holds prefixes, so what others hold too are the first ones: a search finds the rest.
        # (A block that was computed twice may break this rule; then the value is a little off.)
        num_shared = bisect_left(lease.block_ids, 1, key=lambda block_id: self._num_references(block_id) == 1)
        num_exclusive = len(lease.block_ids) - num_shared
        if num_exclusive == 0:
            return math.inf
        # Whole blocks, the last one too: only so is a value per block never more than one per exclusive block.
        cost_s = self._rates.prefill_s(num_exclusive * self._block_size, num_cached=num_shared * self._block_size)
        return chance * cost_s / num_exclusive
