"""Prefix algebra, against its definition."""

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bidikv_sdk.prefix import common_prefix_length, num_blocks

ids = st.lists(st.integers(-(2**31), 2**31 - 1), max_size=50)
FORMS = [
    list,
    tuple,
    lambda x: array("i", x),
    lambda x: memoryview(array("i", x)),
    lambda x: array("i", x).tobytes(),
]


def defined_length(a, b):
    """Count equal leading ids one by one."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


@given(ids, ids, ids, st.sampled_from(FORMS), st.sampled_from(FORMS))
def test_common_prefix_is_what_the_definition_says(shared, rest_a, rest_b, form_a, form_b):
    """Any two forms of token ids agree with the one-by-one count."""
    a, b = shared + rest_a, shared + rest_b
    assert common_prefix_length(form_a(a), form_b(b)) == defined_length(a, b)


@given(st.integers(0, 20_000), st.integers(0, 20_000))
def test_common_prefix_finds_the_one_difference_of_long_sequences(num_tokens, position):
    """A difference anywhere, also at the edge of a compared slice, is found exactly."""
    a = array("i", range(num_tokens))
    b = array("i", a)
    if position < num_tokens:
        b[position] ^= 1 << (position % 31)
    assert common_prefix_length(a, b) == min(position, num_tokens)


@pytest.mark.parametrize("position", [0, 1, 4095, 4096, 4097, 8191])
def test_common_prefix_at_the_edges_of_slices(position):
    """The places where the slices meet are no special case."""
    a = array("i", [7] * 8192)
    b = array("i", a)
    b[position] = 8
    assert common_prefix_length(a, memoryview(b)) == position


@pytest.mark.parametrize("wrong", [b"123", array("q", [1]), memoryview(array("i", range(4)))[::2]])
def test_other_buffers_are_refused(wrong):
    """Bytes that are no whole ids, other integers and strided views are a ValueError, not a wrong answer."""
    with pytest.raises(ValueError, match="contiguous int32"):
        common_prefix_length(wrong, [1, 2, 3])


def test_an_id_beyond_int32_is_refused():
    """An id that no tokenizer has is an OverflowError."""
    with pytest.raises(OverflowError):
        common_prefix_length([2**31], [1])


@given(st.integers(0, 10**9), st.integers(1, 10**4))
def test_blocks_hold_the_tokens_and_no_block_is_spare(num_tokens, block_size):
    """As many blocks as needed, and not one more."""
    blocks = num_blocks(num_tokens, block_size)
    assert blocks * block_size >= num_tokens > (blocks - 1) * block_size


@pytest.mark.parametrize(("num_tokens", "block_size"), [(-1, 16), (1, 0), (1, -16)])
def test_impossible_counts_are_refused(num_tokens, block_size):
    """Negative tokens and empty blocks are a ValueError that shows both values."""
    with pytest.raises(ValueError, match=f"num_tokens={num_tokens}, block_size={block_size}"):
        num_blocks(num_tokens, block_size)
