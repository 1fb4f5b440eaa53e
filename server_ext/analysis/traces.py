"""Parses traces that hold block hashes in place of prompts: kv-cache-tester and Mooncake, AIPerf's too."""

from collections.abc import Iterator
from typing import Annotated, Any, Final, TypeAlias

import msgspec

from .requests import MAX_TOKENS, Request, chain_blocks

_MOONCAKE_BLOCK: Final = 512
"""Of the published traces; a row may say otherwise."""
_USUAL_BLOCKS: Final = (_MOONCAKE_BLOCK, 1024, 256, 128, 64, 32, 16)
_KV_TESTER_BLOCK: Final = 64
_MAX_DEPTH: Final = 16
"""Of sub-agents in sub-agents."""

# What lies beyond is a broken log.
_Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=MAX_TOKENS)]
# Far above any engine's block: a short row must not stand for millions of chunks.
_BlockSize: TypeAlias = Annotated[int, msgspec.Meta(ge=1, le=1 << 13)]
# Thirty thousand years: nanoseconds that are taken for seconds are no times.
_Seconds: TypeAlias = Annotated[float, msgspec.Meta(ge=-1e12, le=1e12)]
_Duration: TypeAlias = Annotated[float, msgspec.Meta(ge=0, le=1e12)]
_Millis: TypeAlias = Annotated[float, msgspec.Meta(ge=-1e15, le=1e15)]


class _Inner(msgspec.Struct):
    t: _Seconds = 0.0
    type: str = "n"
    model: str = ""
    num_input: _Count = msgspec.field(default=0, name="in")
    num_output: _Count = msgspec.field(default=0, name="out")
    hash_ids: list[int] = []
    api_time: _Seconds | None = None
    ttft: _Duration | None = None
    stop: str | None = None
    agent_id: str = ""
    requests: list["_Inner"] = []
    tool_tokens: _Count = 0
    system_tokens: _Count = 0


class _Trace(msgspec.Struct):
    requests: list[_Inner]
    id: str = ""
    block_size: _BlockSize = _KV_TESTER_BLOCK
    hash_id_scope: str = "local"
    tool_tokens: _Count = 0
    system_tokens: _Count = 0


class _Row(msgspec.Struct):
    timestamp: _Millis | None = None
    created_time: _Millis | None = None
    delay: _Millis | None = None
    delay_ms: _Millis | None = None
    input_length: _Count | None = None
    input_tokens: _Count | None = None
    output_length: _Count | None = None
    output_tokens: _Count | None = None
    hash_ids: list[int | str] = []
    session_id: str | int | None = None
    block_size: _BlockSize | None = None
    model: str = ""
    request_id: str | int | None = None


_TRACE: Final = msgspec.json.Decoder(_Trace)
_ROW: Final = msgspec.json.Decoder(_Row)


class BlocksError(ValueError):
    """A row has more or fewer hashes than its prompt has blocks."""


def parse_kv_cache_tester(where: str, line: bytes) -> Iterator[Request]:
    """Yield the requests of a trace: the session's own, and each sub-agent's as a session of its own.

    Raises:
        msgspec.DecodeError, ValueError: it is malformed; nothing was yielded.
    """
    trace = _TRACE.decode(line)
    name = trace.id or where
    scope = name if trace.hash_id_scope == "local" else ""
    for session_name, owner, start_s in _sessions(name, trace):
        yield from _session(where, session_name, owner, trace, scope, start_s)


def _sessions(name: str, trace: _Trace) -> list[tuple[str, "_Trace | _Inner", float]]:
    """Return the name, the owner of the requests and the start of each session of a trace, its own first.

    Raises:
        ValueError: its sub-agents lie deeper in each other than `_MAX_DEPTH`.
    """
    level: list[tuple[str, _Trace | _Inner, float]] = [(name, trace, 0.0)]
    found: list[tuple[str, _Trace | _Inner, float]] = []
    for _ in range(_MAX_DEPTH + 1):
        found += level
        level = [
            (f"{owner_name}/{inner.agent_id or index}", inner, start_s + inner.t)
            for owner_name, owner, start_s in level
            for index, inner in enumerate(owner.requests)
            if inner.requests
        ]
    if level:
        msg = f"sub-agents lie deeper in each other than {_MAX_DEPTH}"
        raise ValueError(msg)
    return found


def _session(
    where: str, name: str, owner: "_Trace | _Inner", trace: _Trace, scope: str, start_s: float
) -> Iterator[Request]:
    for index, one in enumerate(owner.requests):
        if one.requests or one.type == "subagent":
            continue
        at_s = start_s + one.t
        yield Request(
            where=f"{where}#{index}",
            session_id=name,
            start_s=at_s,
            end_s=None if one.api_time is None else at_s + one.api_time,
            model=one.model,
            chunk_ids=chain_blocks(one.hash_ids, trace.block_size, one.num_input, scope=scope),
            num_prompt_tokens=one.num_input,
            num_output_tokens=one.num_output,
            ttft_s=one.ttft,
            ends_in_tool=None if one.stop is None else one.stop == "tool_use",
            num_tool_tokens=owner.tool_tokens,
            num_system_tokens=owner.system_tokens,
        )


def parse_mooncake(where: str, line: bytes) -> Request:
    """Return the request of a row. Times are milliseconds; a row with a `delay` continues its session.

    Raises:
        BlocksError: what its hashes stand for cannot be told.
        msgspec.DecodeError, ValueError: it is malformed.
    """
    row = _ROW.decode(line)
    num_prompt = row.input_length if row.input_length is not None else row.input_tokens
    num_output = row.output_length if row.output_length is not None else row.output_tokens
    if num_prompt is None:
        msg = "a Mooncake row needs 'input_length'"
        raise ValueError(msg)
    start_ms = row.timestamp if row.timestamp is not None else row.created_time
    delay_ms = row.delay if row.delay is not None else row.delay_ms
    hashes: list[Any] = row.hash_ids
    session_id = _id(row.session_id)
    return Request(
        where=where,
        session_id=session_id,
        request_id=_id(row.request_id),
        start_s=None if start_ms is None else start_ms / 1e3,
        model=row.model,
        chunk_ids=chain_blocks(hashes, _block_size(row, num_prompt), num_prompt),
        num_prompt_tokens=num_prompt,
        num_output_tokens=num_output or 0,
        delay_s=None if delay_ms is None else delay_ms / 1e3,
        is_delta=session_id is not None and start_ms is None,
    )


def _block_size(row: _Row, num_prompt: int) -> int:
    """Return how many tokens a hash of a row stands for: what the row says, or the first usual size that fits.

    Raises:
        BlocksError: none fits.
    """
    sizes = _USUAL_BLOCKS if row.block_size is None else (row.block_size,)
    for size in sizes:
        # Some hash a last block that is not full, some do not.
        if not row.hash_ids or len(row.hash_ids) in {num_prompt // size, -(-num_prompt // size)}:
            return size
    msg = f"{len(row.hash_ids)} hashes do not fit {num_prompt} tokens in blocks of {sizes}"
    raise BlocksError(msg)


def _id(value: str | int | None) -> str | None:
    """Return an id as text; an empty one is none: it would make one of all that have it."""
    return None if value is None else str(value) or None
