"""Counts every reference that a lease table holds, by block; nothing else in the core pins or unpins.

Two books: *revocable* references (leases and provisional pins, which give way to requests) and *ticketed*
ones (which do not). A third counts what leases hold, per pool and tenant, for the budgets. All calls are
O(blocks given).
"""

from collections import Counter, defaultdict
from itertools import islice
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from array import array

    from .ports import BlockPins


class BlockLedger:
    """References by block. `block_ids` [num_blocks] are in the order of the tokens, without repeats."""

    def __init__(self, pins: "BlockPins") -> None:
        self._pins = pins
        self._revocable: Counter[int] = Counter()
        self._ticketed: Counter[int] = Counter()
        self._leased: Counter[int] = Counter()
        self._leased_by_tenant: defaultdict[str, Counter[int]] = defaultdict(Counter)

    @property
    def num_leased_blocks(self) -> int:
        """Distinct blocks that leases hold."""
        return len(self._leased)

    @property
    def num_ticketed_blocks(self) -> int:
        """Distinct blocks that open tickets hold."""
        return len(self._ticketed)

    def pin(self, block_ids: "array[int]") -> None:
        """Take revocable references."""
        self._pins.pin(block_ids)
        self._revocable.update(block_ids)

    def unpin(self, block_ids: "array[int]") -> None:
        """Give back revocable references, the tail first, for the head is what others may still reuse."""
        if block_ids:
            _subtract(self._revocable, block_ids)
            self._pins.unpin(block_ids[::-1])

    def open_ticket(self, block_ids: "array[int]") -> None:
        """Take the references of a ticket."""
        self._pins.pin(block_ids)
        self._ticketed.update(block_ids)

    def close_ticket(self, block_ids: "array[int]") -> None:
        """Give back the references of a ticket."""
        _subtract(self._ticketed, block_ids)
        self._pins.unpin(block_ids[::-1])

    def num_ticketed_with(self, block_ids: "array[int]") -> int:
        """Return the distinct blocks that tickets would hold, were there one more on `block_ids`."""
        ticketed = self._ticketed
        return len(ticketed) + sum(block_id not in ticketed for block_id in block_ids)

    def charge(self, tenant: str, block_ids: "array[int]") -> None:
        """Count pinned blocks as leased."""
        if block_ids:
            self._leased.update(block_ids)
            self._leased_by_tenant[tenant].update(block_ids)

    def credit(self, tenant: str, block_ids: "array[int]") -> None:
        """Count blocks as leased once less."""
        if block_ids:
            _subtract(self._leased, block_ids)
            by_tenant = self._leased_by_tenant[tenant]
            _subtract(by_tenant, block_ids)
            if not by_tenant:
                del self._leased_by_tenant[tenant]

    def num_affordable(self, tenant: str, block_ids: "array[int]", *, max_leased: int, max_tenant_leased: int) -> int:
        """Return how many of the first `block_ids` could be charged; a leased one costs nothing more."""
        leased, by_tenant = self._leased, self._leased_by_tenant.get(tenant, Counter())
        room, tenant_room = max_leased - len(leased), max_tenant_leased - len(by_tenant)
        for index, block_id in enumerate(block_ids):
            room -= block_id not in leased
            tenant_room -= block_id not in by_tenant
            if room < 0 or tenant_room < 0:
                return index
        return len(block_ids)

    def num_reclaimable(self, *, limit: int | None = None) -> int:
        """Return how many blocks only revocable references hold; counts no further than `limit`."""
        num_references = self._pins.num_references
        ours_alone = (b for b, count in self._revocable.items() if num_references(b) == count)
        return sum(1 for _ in islice(ours_alone, limit))


def _subtract(counter: Counter[int], block_ids: "array[int]") -> None:
    # Zeros go, for the length of a counter is the number of distinct blocks.
    for block_id in block_ids:
        count = counter[block_id]
        if count > 1:
            counter[block_id] = count - 1
        else:
            counter.pop(block_id)
