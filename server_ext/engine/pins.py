"""The block pool as the lease table sees it: a pin is one more reference, as vLLM's own prefix hits take them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


class BlockPoolPins:
    """`core.ports.BlockPins` over vLLM's `BlockPool`.

    A pinned block has left the free queue, keeps its hash, and so still serves D's own prefix cache; an idle engine
    has nothing to do for it.
    """

    def __init__(self, pool: Any) -> None:
        self._pool = pool

    def pin(self, block_ids: Sequence[int]) -> None:
        """Take one more reference on each block."""
        blocks = self._pool.blocks
        self._pool.touch([blocks[block_id] for block_id in block_ids])

    def unpin(self, block_ids: Iterable[int]) -> None:
        """Drop one reference on each block; the first given is evicted first."""
        blocks = self._pool.blocks
        self._pool.free_blocks(blocks[block_id] for block_id in block_ids)

    def num_references(self, block_id: int) -> int:
        """Return all references on a block: leases, tickets and requests."""
        return int(self._pool.blocks[block_id].ref_cnt)

    def seals(self, block_ids: Sequence[int]) -> list[object | None]:
        """Return each block's hash object, which vLLM takes away when it gives the block to anybody else.

        The object and not its value: an equal hash may have been made anew, of a block that is only being computed.
        """
        blocks = self._pool.blocks
        return [blocks[block_id].block_hash for block_id in block_ids]

    def num_free_blocks(self) -> int:
        """Return the blocks that an allocation could take now."""
        return int(self._pool.get_num_free_blocks())

    def num_total_blocks(self) -> int:
        """Return the blocks of the pool; vLLM's null block, which nobody can hold, is not counted."""
        return int(self._pool.num_gpu_blocks) - 1
