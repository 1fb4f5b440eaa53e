"""One logged request, in the form that all formats are brought to, and the chunks that prompts are compared by.

A prompt is a list of chunk ids. A chunk stands for about `CHUNK_TOKENS` tokens, and its id for everything up to
its end: ids are chained, so where two prompts have the same id at a position, they are the same up to there.
Ids hold within one process only. Of contents only hashes are kept, unless cache misses are to quote them.
"""

from array import array
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from hashlib import blake2b
from typing import Final, NamedTuple

CHUNK_TOKENS: Final = 64
"""The blocks of the published traces; also a usual block of engines. Finer is slower and changes little."""
BYTES_PER_TOKEN: Final = 4
"""Usual for English and code; only for logs that give no counts."""
MAX_TOKENS: Final = 1 << 29
"""No count of a log is larger: far above any prompt, and a prompt with its answer is still an int32."""
_CHUNK_BYTES: Final = CHUNK_TOKENS * BYTES_PER_TOKEN


class Kind(IntEnum):
    """What a part of a prompt is."""

    TOOL_DEF = 0
    SYSTEM = 1
    USER = 2
    ASSISTANT = 3
    TOOL = 4
    OTHER = 5


@dataclass(frozen=True, slots=True)
class Part:
    """A region of a prompt, in the order of the wire: one tool's definition, or one message."""

    kind: Kind
    raw: bytes
    """As it was sent."""
    hash: int = field(init=False)
    """What is kept of it; the same in every run."""

    def __post_init__(self) -> None:
        digest = blake2b(self.raw, digest_size=8).digest()
        object.__setattr__(self, "hash", int.from_bytes(digest, "little"))


@dataclass(slots=True, kw_only=True)
class Request:
    """A request as its log tells it; None is what the log does not tell."""

    where: str
    """`file:line`, for messages."""
    session_id: str | None = None
    request_id: str | None = None
    start_s: float | None = None
    end_s: float | None = None
    model: str = ""
    chunk_ids: "array[int]" = field(default_factory=lambda: array("q"))
    """[full chunks of the prompt], int64."""
    tokens_per_chunk: float = CHUNK_TOKENS
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_cached_tokens: int | None = None
    """Of the prompt, that the serving system found in a cache."""
    ttft_s: float | None = None
    parts: list[Part] = field(default_factory=list)
    """Empty where the log has ids or hashes only."""
    data: bytes = b""
    """What `chunk_ids` was made from, where that was bytes: to compare what no full chunk covers."""
    reply: int | None = None
    """Of the answer, as `reply_fingerprint`."""
    ends_in_tool: bool | None = None
    """Whether the answer calls a tool: then a program comes back, not a human."""
    num_tool_tokens: int = 0
    num_system_tokens: int = 0
    """Where the log has no parts, but says how long these are; the tools come first."""
    delay_s: float | None = None
    """Since the end of the turn before, for logs without clock times."""
    is_delta: bool = False
    """Only what is new is logged: the history is the session's own."""
    is_estimated: bool = False
    """Token counts are guessed from sizes."""

    @property
    def has_content(self) -> bool:
        """Whether there is anything to compare with another prompt."""
        return bool(self.chunk_ids or self.parts or self.data)


def chain_bytes(data: bytes) -> "array[int]":
    """Return the chunk ids of a text's bytes; a last, partly filled chunk has none."""
    ids, last = array("q"), 0
    for start in range(0, len(data) - _CHUNK_BYTES + 1, _CHUNK_BYTES):
        last = hash((last, data[start : start + _CHUNK_BYTES]))
        ids.append(last)
    return ids


def pack_ids(token_ids: Sequence[int]) -> bytes:
    """Return token ids [num_tokens] as bytes: four each, so that a chunk of ids is as long as one of text.

    Raises:
        OverflowError, TypeError: something is not an int32.
    """
    return array("i", token_ids).tobytes()


def chain_blocks(block_hashes: Sequence[object], block_size: int, num_tokens: int, *, scope: str = "") -> "array[int]":
    """Return the chunk ids of a prompt that is logged as one hash per block.

    Args:
        block_hashes: [num_blocks], of whatever hashable kind.
        block_size: tokens per block.
        num_tokens: of the prompt; a last block that is not full does not count.
        scope: what the hashes are unique in.
    """
    ids, last = array("q"), hash(scope)
    num_covered = min(num_tokens, len(block_hashes) * block_size)
    if num_covered == num_tokens:
        num_covered -= num_tokens % block_size
    for start in range(0, num_covered - CHUNK_TOKENS + 1, CHUNK_TOKENS):
        last_block = -(-(start + CHUNK_TOKENS) // block_size)
        last = hash((last, *block_hashes[start // block_size : last_block]))
        ids.append(last)
    return ids


class Tail(NamedTuple):
    """The bytes of a prompt that no full chunk covers: how many, and a hash of them; like chunk ids, of one process."""

    num_bytes: int
    hash: int


def tail_of(request: Request) -> Tail:
    """Return what stands for the bytes of a prompt that no full chunk covers."""
    data = request.data[len(request.chunk_ids) * _CHUNK_BYTES :]
    return Tail(len(data), hash(data))


def continues(request: Request, num_chunks: int, tail: Tail) -> bool:
    """Return whether a prompt goes on, after its first `num_chunks` chunks, with the tail of another one."""
    start = num_chunks * _CHUNK_BYTES
    return not tail.num_bytes or hash(request.data[start : start + tail.num_bytes]) == tail.hash


def num_shared_chunks(a: "array[int]", b: "array[int]") -> int:
    """Return how many leading chunks two prompts have in common."""
    # Chained ids agree up to some position and never after it, so that position can be bisected.
    return bisect_left(range(min(len(a), len(b))), x=True, key=lambda index: a[index] != b[index])


def reply_fingerprint(content: object, tool_calls: object) -> int:
    """Return a fingerprint of an assistant's message that does not depend on how its JSON is written."""
    calls = []
    for call in tool_calls if isinstance(tool_calls, list) else []:
        function = call.get("function") if isinstance(call, dict) else None
        if isinstance(function, dict):
            calls.append((str(function.get("name")), str(function.get("arguments"))))
    return hash((content if isinstance(content, str) else repr(content or ""), tuple(calls)))
