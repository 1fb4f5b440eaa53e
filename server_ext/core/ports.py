"""What the core needs from an engine: references on the blocks of its KV cache pool."""

from collections.abc import Sequence
from typing import Protocol


class BlockPins(Protocol):
    """Counted references on blocks; a block is free when nobody holds one.

    Called on the thread that owns the pool, with ids of blocks that exist. A block that loses its last
    reference may still serve the engine's prefix cache until it is used again.
    """

    def pin(self, block_ids: Sequence[int]) -> None:
        """Take one reference on each of `block_ids` [num_blocks]."""
        ...

    def unpin(self, block_ids: Sequence[int]) -> None:
        """Give back one reference on each of `block_ids` [num_blocks]; the first is evicted first."""
        ...

    def num_references(self, block_id: int) -> int:
        """Return all references on a block: ours, and those of requests that run or wait."""
        ...

    def seals(self, block_ids: Sequence[int]) -> list[object | None]:
        """Return the seal of each block: one and the same object for as long as the block keeps what is in it.

        None for a block that the prefix cache does not know. Compare seals with `is`, and hold them while you do.
        """
        ...

    def num_free_blocks(self) -> int:
        """Return the number of blocks that a request could be given now."""
        ...

    def num_total_blocks(self) -> int:
        """Return the number of blocks that requests can ever be given."""
        ...
