"""Takes and gives back every reference that a lease table holds, and counts blocks for its limits.

Nothing else in the core pins or unpins. Three books: what leases hold, in all and by tenant, for the budgets; and
what open tickets hold, for their cap. All calls are O(blocks given).
"""

from collections import defaultdict
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from array import array

    from .ports import BlockPins


class BlockCounts:
    """A multiset of blocks, made for what is common: a block that is in it once.

    Those lie in a set, whose operations take a whole lease at a time (a few microseconds for 256 blocks, a tenth of
    what a loop over a dict of counts takes); only blocks that are in it more often are counted one by one.
    """

    def __init__(self) -> None:
        self._once: set[int] = set()
        self._count_of_others: dict[int, int] = {}

    def __len__(self) -> int:
        """Return the number of distinct blocks."""
        return len(self._once) + len(self._count_of_others)

    def add(self, block_ids: "array[int]") -> None:
        """Count each of the blocks, distinct ones, once more."""
        blocks = set(block_ids)
        if not self._count_of_others and self._once.isdisjoint(blocks):
            self._once |= blocks
            return
        others = blocks & self._count_of_others.keys()
        for block_id in others:
            self._count_of_others[block_id] += 1
        again = blocks & self._once
        if again:
            self._once -= again
            self._count_of_others.update(dict.fromkeys(again, 2))
        self._once |= blocks - again - others if again or others else blocks

    def remove(self, block_ids: "array[int]") -> None:
        """Count each of the blocks, distinct ones that are in here, once less."""
        self._once.difference_update(block_ids)
        if not self._count_of_others:
            return
        for block_id in self._count_of_others.keys() & block_ids:
            self._count_of_others[block_id] -= 1
            if self._count_of_others[block_id] == 1:
                del self._count_of_others[block_id]
                self._once.add(block_id)

    def __contains__(self, block_id: int) -> bool:
        """Return whether the block is in here at all."""
        return block_id in self._once or block_id in self._count_of_others


_NO_BLOCKS: Final = BlockCounts()
"""Nobody adds to it."""


class BlockLedger:
    """References by block. `block_ids` [num_blocks] are in the order of the tokens, without repeats.

    Args:
        pins: the engine's block pool.
        counts_tenants: whether a tenant may be allowed less than all together; if not, that book is not kept.
    """

    def __init__(self, pins: "BlockPins", *, counts_tenants: bool) -> None:
        self._pins = pins
        self._counts_tenants = counts_tenants
        self._ticketed = BlockCounts()
        self._leased = BlockCounts()
        self._leased_by_tenant: defaultdict[str, BlockCounts] = defaultdict(BlockCounts)
        # Kept, not counted: they are asked for at every sweep, and change a few times a turn.
        self.num_leased_blocks = 0
        """Distinct blocks that leases hold."""
        self.num_ticketed_blocks = 0
        """Distinct blocks that open tickets hold."""

    def pin(self, block_ids: "array[int]") -> None:
        """Take references that give way to requests."""
        self._pins.pin(block_ids)

    def unpin(self, block_ids: "array[int]") -> None:
        """Give back such references, the tail first, for the head is what others may still reuse."""
        if block_ids:
            self._pins.unpin(block_ids[::-1])

    def open_ticket(self, block_ids: "array[int]") -> None:
        """Take the references of a ticket."""
        self._pins.pin(block_ids)
        self._ticketed.add(block_ids)
        self.num_ticketed_blocks = len(self._ticketed)

    def close_ticket(self, block_ids: "array[int]") -> None:
        """Give back the references of a ticket."""
        self._ticketed.remove(block_ids)
        self.num_ticketed_blocks = len(self._ticketed)
        self._pins.unpin(block_ids[::-1])

    def can_ticket(self, block_ids: "array[int]", *, max_ticketed: int) -> bool:
        """Return whether tickets would hold at most so many distinct blocks, were there one more on `block_ids`."""
        ticketed = self._ticketed
        if len(ticketed) + len(block_ids) <= max_ticketed:
            return True
        return len(ticketed) + sum(block_id not in ticketed for block_id in block_ids) <= max_ticketed

    def charge(self, tenant: str, block_ids: "array[int]") -> None:
        """Count pinned blocks as leased."""
        if block_ids:
            self._leased.add(block_ids)
            self.num_leased_blocks = len(self._leased)
            if self._counts_tenants:
                self._leased_by_tenant[tenant].add(block_ids)

    def credit(self, tenant: str, block_ids: "array[int]") -> None:
        """Count blocks as leased once less."""
        if block_ids:
            self._leased.remove(block_ids)
            self.num_leased_blocks = len(self._leased)
            if self._counts_tenants:
                by_tenant = self._leased_by_tenant[tenant]
                by_tenant.remove(block_ids)
                if not by_tenant:
                    del self._leased_by_tenant[tenant]

    def num_affordable(self, tenant: str, block_ids: "array[int]", *, max_leased: int, max_tenant_leased: int) -> int:
        """Return how many of the first `block_ids` could be charged; a leased one costs nothing more."""
        if not self._counts_tenants and len(block_ids) <= max_leased - self.num_leased_blocks:
            return len(block_ids)
        leased, by_tenant = self._leased, self._leased_by_tenant.get(tenant, _NO_BLOCKS)
        room, tenant_room = max_leased - self.num_leased_blocks, max_tenant_leased - len(by_tenant)
        if len(block_ids) <= min(room, tenant_room):
            return len(block_ids)
        for index, block_id in enumerate(block_ids):
            room -= block_id not in leased
            tenant_room -= block_id not in by_tenant
            if room < 0 or tenant_room < 0:
                return index
        return len(block_ids)
