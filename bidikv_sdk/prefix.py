"""Prefix algebra: how far two token sequences agree, and how many blocks that is.

Pure and dependency-free, shared by the SDK and the server; may import the standard library only.
"""

from array import array
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Sequence

TokenIds: TypeAlias = "Sequence[int] | array[int] | memoryview | bytes | bytearray"
"""Token ids [num_tokens]: a sequence of ints, or a contiguous buffer of int32 (`bytes`: packed int32)."""

_ID_BYTES = 4
# Slices are compared as bytes objects (one memcmp each). 4096 ids copy 16 KiB, which stays in the L1 cache,
# so an early difference costs one slice and a long agreement costs little more than reading it.
_SLICE_BYTES = 4096 * _ID_BYTES
# Up to so many, a copy of both is faster than views on them.
_FEW_IDS = 4096


def common_prefix_length(a: TokenIds, b: TokenIds) -> int:
    """Return the number of leading token ids that `a` [n] and `b` [m] have in common, 0 to min(n, m).

    Buffers of int32 (`array('i')`, `memoryview`, `bytes`) are compared without a per-token loop; other
    sequences are packed into one first.

    Raises:
        ValueError: a buffer is not contiguous int32.
        OverflowError: an id of a sequence does not fit in int32.
    """
    if isinstance(a, array) and isinstance(b, array) and a.typecode == b.typecode == "i":
        num_ids = min(len(a), len(b))
        if num_ids <= _FEW_IDS:
            part_a, part_b = a[:num_ids].tobytes(), b[:num_ids].tobytes()
            return num_ids if part_a == part_b else _first_difference(part_a, part_b)
    view_a, view_b = _as_bytes(a), _as_bytes(b)
    num_bytes = min(len(view_a), len(view_b))
    for start in range(0, num_bytes, _SLICE_BYTES):
        stop = min(start + _SLICE_BYTES, num_bytes)
        part_a, part_b = bytes(view_a[start:stop]), bytes(view_b[start:stop])
        if part_a != part_b:
            return start // _ID_BYTES + _first_difference(part_a, part_b)
    return num_bytes // _ID_BYTES


def _first_difference(a: bytes, b: bytes) -> int:
    """Return the index of the first id that differs; there is one."""
    # It is where the lowest set bit of the difference lies.
    difference = int.from_bytes(a, "little") ^ int.from_bytes(b, "little")
    first_bit = (difference & -difference).bit_length() - 1
    return first_bit // 8 // _ID_BYTES


def num_blocks(num_tokens: int, block_size: int) -> int:
    """Return how many blocks of `block_size` tokens hold `num_tokens`; a last, partly filled one counts.

    Raises:
        ValueError: `num_tokens` is negative, or `block_size` is not positive.
    """
    if num_tokens < 0 or block_size <= 0:
        msg = f"need num_tokens >= 0 and block_size > 0, got num_tokens={num_tokens}, block_size={block_size}"
        raise ValueError(msg)
    return -(-num_tokens // block_size)


def _as_bytes(token_ids: TokenIds) -> memoryview:
    if not isinstance(token_ids, bytes | bytearray | memoryview | array):
        token_ids = array("i", token_ids)
    view = memoryview(token_ids)
    if not view.c_contiguous or not (view.format == "i" or (view.format == "B" and not view.nbytes % _ID_BYTES)):
        msg = f"token ids must be contiguous int32, got format {view.format!r} of {view.nbytes} bytes"
        raise ValueError(msg)
    return view.cast("B")
