"""Which lease gives way first under memory pressure. Policies decide, the table counts.

What the table itself sees to, whatever the policy: nothing waits here that was superseded (a turn's lease replaces
the one before at once), what has expired is given back before any policy is asked, leases of running turns come
after all others, and only what frees a block is taken. A policy is any callable like `RevocationOrder`; two are
here, and the setting `revocation` chooses.
"""

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from heapq import heappop, heappush
from operator import attrgetter
from typing import Final, Protocol, TypeAlias

from .gaps import GapModel
from .rates import Rates
from .records import Lease

# Under pressure every step may revoke, and what a lease is worth changes by the second.
_MAX_AGE_S: Final = 1.0

_Rank: TypeAlias = tuple[float, float, int, Lease, int, float]
"""Of a lease: its value per block, its end, a number, itself, its blocks, and the chance of its session's return."""


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
    never more, and by that per exclusive block once it is its turn. The first rank is kept for a second, for under
    pressure every step may ask: then only what is new, and what comes first, is looked at.

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
        self._ranks: list[_Rank] = []
        self._ranked: set[Lease] = set()
        self._num_ranked = 0
        self._ranked_s = -math.inf

    def __call__(self, leases: Iterable[Lease], *, now_s: float) -> Iterator[Lease]:
        """Yield `leases`, the one with the least value per exclusive block first."""
        ranks, ranked = self._ranks, self._ranked
        if not 0 <= now_s - self._ranked_s < _MAX_AGE_S:
            ranks.clear()
            ranked.clear()
            self._ranked_s = now_s
        wanted = dict.fromkeys(leases)
        for lease in wanted:
            if lease not in ranked:
                self._rank(lease, now_s=now_s)
        looked_at: list[_Rank] = []
        exact: list[tuple[float, float, int, Lease]] = []
        try:
            while ranks or exact:
                if exact and (not ranks or exact[0][:3] <= ranks[0][:3]):
                    yield heappop(exact)[3]
                    continue
                rank = heappop(ranks)
                _, due_s, number, lease, num_blocks, chance = rank
                ranked.discard(lease)
                if lease not in wanted:
                    continue
                if due_s != lease.due_s or num_blocks != len(lease.block_ids):
                    self._rank(lease, now_s=now_s)  # renewed since, and worth more than it was
                    continue
                looked_at.append(rank)
                heappush(exact, (self._value(lease, chance), due_s, number, lease))
        finally:
            for rank in looked_at:
                lease, num_blocks = rank[3:5]
                # What was clipped is worth less than it was: the next call ranks it anew.
                if lease not in ranked and len(lease.block_ids) == num_blocks:
                    ranked.add(lease)
                    heappush(ranks, rank)

    def _rank(self, lease: Lease, *, now_s: float) -> None:
        chance = self._gaps.return_chance(lease.key, lease.due_s, now_s=now_s)
        num_blocks = len(lease.block_ids)
        least = chance * self._rates.prefill_s(num_blocks * self._block_size) / num_blocks
        self._num_ranked += 1
        # At equal value the one that ends first; the number keeps leases from being compared.
        heappush(self._ranks, (least, lease.due_s, self._num_ranked, lease, num_blocks, chance))
        self._ranked.add(lease)

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
