"""Takes blocks back from leases: the fewest, from their tails, that free as many as a request needs.

`count_reclaimable` is the question and `plan_revocation` the answer, both pure; `Revoker` carries the plan out for the
engine, and drops all leases where the engine starts its cache anew. Only `leases` calls it.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

from .records import Lease

if TYPE_CHECKING:
    from bidikv_sdk.wire import Reason

    from .holdings import Holdings
    from .policy import RevocationOrder
    from .ports import BlockPins


class Revoker:
    """The leases and pins of one table, as the engine's memory sees them.

    Args:
        held: what the table holds.
        pins: the engine's block pool.
        order: which lease gives way first.
    """

    def __init__(self, held: "Holdings", pins: "BlockPins", order: "RevocationOrder") -> None:
        self._held = held
        self._pins = pins
        self._order = order

    def num_reclaimable(self, *, now_s: float, limit: int | None = None) -> int:
        """Return how many blocks would become free were all leases and pins revoked, counted up to `limit`.

        Pass a limit where enough is enough: without one every leased block is looked at.
        """
        self._held.sweep(now_s=now_s)
        return count_reclaimable(self._held.revocable(), self._pins.num_references, limit=limit)

    def revoke(self, num_blocks: int, *, now_s: float, all_or_nothing: bool) -> int:
        """Free `num_blocks` blocks if leases hold as many that nobody else does, else all of those, or none.

        What has expired goes first, then leases by the order, those of open turns, and provisional pins at
        last; each is clipped from its tail, by as little as does. Returns how many blocks became free. With
        `all_or_nothing` no lease is touched where that would not do; what has expired goes all the same.
        """
        num_free_before = self._pins.num_free_blocks()
        self._held.sweep(now_s=now_s)
        num_missing = num_blocks - (self._pins.num_free_blocks() - num_free_before)
        if num_missing > 0 and (not all_or_nothing or self._can_revoke(num_missing, now_s=now_s)):
            victims = self._victims(now_s=now_s)
            for lease, num_kept in plan_revocation(victims, num_missing, self._pins.num_references):
                self._held.clip(lease, num_kept)
        return self._pins.num_free_blocks() - num_free_before

    def _can_revoke(self, num_blocks: int, *, now_s: float) -> bool:
        # The first comparison is O(1): what a request can never get is asked for again at every step.
        held = self._held.num_blocks_by_holder()
        may_suffice = held["lease"] + held["provisional"] >= num_blocks
        return may_suffice and self.num_reclaimable(now_s=now_s, limit=num_blocks) == num_blocks

    def _victims(self, *, now_s: float) -> Iterator[Lease]:
        in_use = []
        for lease in self._order(self._held.leases.values(), now_s=now_s):
            if self._held.slots[lease.key].turn is None:
                yield lease
            else:
                in_use.append(lease)
        yield from in_use
        yield from self._held.pins_of_turns()

    def release_all(self, reason: "Reason", *, now_s: float) -> None:
        """Drop every lease and pin with this reason, for a cache reset, sleep or new weights.

        Open tickets stay until they are returned or due: their references are their own. After new weights
        (`model_changed`) an open turn gets no pin any more: what it computes is of either.
        """
        self._held.sweep(now_s=now_s)
        for key in list(self._held.leases):
            self._held.end_lease(key, "revoked", reason)
        for turn in self._held.turns.values():
            self._held.drop_pin(turn, reason)
            if reason == "model_changed":
                turn.has_old_weights, turn.pin_reason = True, reason
        self._held.lost.clear()


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
