"""What expired and revoked leases have left behind: blocks that nobody holds any more, and whether they still have it.

A block that loses its last reference stays in the engine's prefix cache until it is used again. Its *seal*
(`ports.BlockPins.seals`) is taken when a lease is lost, and compared when its session comes back: the blocks before the
first broken seal hold exactly what they held. Only full blocks have one. Only `holdings` calls this; it remembers as
many blocks as the pool has, the last lost leases first.
"""

from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from array import array

    from .ports import BlockPins
    from .records import Key, Lease


@dataclass(frozen=True, slots=True)
class LostLease:
    """A lease without references."""

    block_ids: "array[int]"
    """[num_blocks], full ones only."""
    seals: list[object]
    """[num_blocks], of the moment at which it was lost."""
    token_ids: "array[int]"
    fingerprint: str
    ttl_s: float


class LostLeases:
    """The lost leases of one pool, at most one of each session."""

    def __init__(self, pins: "BlockPins", *, block_size: int) -> None:
        self._pins = pins
        self._block_size = block_size
        self._lost: OrderedDict[Key, LostLease] = OrderedDict()
        self._num_blocks = 0

    @property
    def num_blocks(self) -> int:
        """Blocks that are remembered."""
        return self._num_blocks

    def remember(self, lease: "Lease") -> None:
        """Remember a lease that ends now, while its blocks are what they were."""
        self.forget(lease.key)
        block_ids = lease.block_ids[: lease.num_tokens // self._block_size]
        seals = self._pins.seals(block_ids)
        num_sealed = next((i for i, seal in enumerate(seals) if seal is None), len(seals))
        if num_sealed:
            lost = LostLease(
                block_ids[:num_sealed], seals[:num_sealed], lease.token_ids, lease.fingerprint, lease.ttl_s
            )
            self._lost[lease.key] = lost
            self._num_blocks += num_sealed
            while self._num_blocks > self._pins.num_total_blocks():
                self.forget(next(iter(self._lost)))

    def forget(self, key: "Key") -> None:
        """Forget a session's lost lease, if there is one."""
        lost = self._lost.pop(key, None)
        if lost is not None:
            self._num_blocks -= len(lost.block_ids)

    def clear(self) -> None:
        """Forget all."""
        self._lost.clear()
        self._num_blocks = 0

    def find(self, key: "Key") -> "tuple[LostLease, array[int]] | None":
        """Return a session's lost lease and those of its first blocks that hold what they held; None without any."""
        lost = self._lost.get(key)
        if lost is None:
            return None
        pairs = enumerate(zip(lost.seals, self._pins.seals(lost.block_ids), strict=True))
        num_intact = next((i for i, (before, now) in pairs if before is not now), len(lost.seals))
        return (lost, lost.block_ids[:num_intact]) if num_intact else None
