"""Replays turns through the server's own lease table, over a block pool that is only numbers.

One replay answers one cell of the grid: with this budget and this life of a lease, what is left when the next
turn comes? Requests hold their blocks from start to end, and take them from leases where the pool is short, as
on the server. Not modelled: waiting (a request that does not fit runs without blocks and leaves no lease),
tickets, blocks that sessions share, and what an ended lease leaves in the prefix cache.
"""

import heapq
from array import array
from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from server_ext.core.gaps import TOOL_PREFIX, GapModel
from server_ext.core.leases import LeaseTable
from server_ext.core.policy import LeastValueFirst
from server_ext.core.rates import ConstantRates
from server_ext.core.records import Key
from server_ext.core.settings import HomeSettings

from .limits import Limits
from .requests import CHUNK_TOKENS
from .turns import Rows

# Between turns the table is swept so often within a lease's life, so that ended leases stop counting in time.
_SWEEPS_PER_TTL: Final = 4
_TENANT: Final = "logs"


class NumberPool:
    """Counted references on numbered blocks (`server_ext.core.ports.BlockPins`)."""

    def __init__(self, num_blocks: int) -> None:
        self._references = np.zeros(num_blocks, dtype=np.int32)
        self._free = np.arange(num_blocks, dtype=np.int32)
        self._num_free = num_blocks

    def pin(self, block_ids: Sequence[int]) -> None:
        """Take a reference on each; blocks that nobody holds come from `take` only."""
        self._references[np.asarray(block_ids)] += 1

    def unpin(self, block_ids: Sequence[int]) -> None:
        """Give back a reference on each."""
        ids = np.asarray(block_ids)
        self._references[ids] -= 1
        freed = ids[self._references[ids] == 0]
        self._free[self._num_free : self._num_free + len(freed)] = freed
        self._num_free += len(freed)

    def take(self, num_blocks: int) -> "array[int]":
        """Return so many free blocks, with a reference on each; there must be as many."""
        self._num_free -= num_blocks
        ids = self._free[self._num_free : self._num_free + num_blocks].copy()
        self._references[ids] += 1
        return array("i", ids.tobytes())

    def num_references(self, block_id: int) -> int:
        """Return all references on a block."""
        return int(self._references[block_id])

    def seals(self, block_ids: Sequence[int]) -> list[object | None]:
        """Seal nothing: a replay does not know what other requests would have written over."""
        return [None] * len(block_ids)

    def num_free_blocks(self) -> int:
        """Return the number of free blocks."""
        return self._num_free

    def num_total_blocks(self) -> int:
        """Return the number of blocks."""
        return len(self._references)


@dataclass(slots=True)
class Replayed:
    """What a replay saw. Turns are those that could have reused something: the second of a session and later."""

    budget_fraction: float
    ttl_s: float
    num_turns: int = 0
    num_whole: int = 0
    """Turns that found all that they could reuse."""
    num_partial: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    """Why there was less, in the words of the server; `no_room`: the turn before had no blocks to leave."""
    reusable_tokens: int = 0
    held_tokens: int = 0
    """Of these, still held."""
    leased_token_s: float = 0.0
    """Tokens times seconds that leases held, over all nodes."""
    peak_leased_tokens: int = 0
    duration_s: float = 0.0
    num_without_room: int = 0
    """Requests for which not even all leases would have made room."""
    revoked_tokens: int = 0
    held_by_row: npt.NDArray[np.int32] | None = None
    """[num_rows], tokens still held when each turn began; only where asked for."""

    @property
    def held_share(self) -> float:
        """Part of the reusable tokens that were still there."""
        return self.held_tokens / self.reusable_tokens if self.reusable_tokens else 0.0

    @property
    def gone_share(self) -> float:
        """Part of the turns that found nothing."""
        return 1 - (self.num_whole + self.num_partial) / self.num_turns if self.num_turns else 0.0

    @property
    def mean_leased_tokens(self) -> float:
        """Tokens under lease, on average over the time replayed."""
        return self.leased_token_s / self.duration_s if self.duration_s else 0.0

    def to_json(self) -> dict[str, Any]:
        """Return all but the rows."""
        data = {name: getattr(self, name) for name in self.__slots__ if name != "held_by_row"}
        data["reasons"] = dict(self.reasons.most_common())
        derived = ("held_share", "gone_share", "mean_leased_tokens")
        return data | {name: getattr(self, name) for name in derived}


@dataclass(slots=True)
class _Running:
    end_s: float
    key: Key
    nonce: str
    ids: "array[int]"
    block_ids: "array[int]"
    ended_by: str
    is_live: bool = True


class _Node:
    """One decode engine."""

    def __init__(self, settings: HomeSettings, limits: Limits) -> None:
        self.pool = NumberPool(max(1, limits.pool_tokens // CHUNK_TOKENS))
        self.gaps = GapModel(max_sessions=settings.max_sessions)
        self.table = LeaseTable(
            self.pool,
            settings,
            block_size=1,  # a block of CHUNK_TOKENS is the unit here: its id stands for its tokens
            max_request_blocks=0,
            new_ticket_id=str,
            order=LeastValueFirst(self.gaps, _chunk_rates(limits), self.pool.num_references, block_size=1),
        )
        self.blocks: dict[Key, array[int]] = {}
        self.ids: dict[Key, array[int]] = {}
        self.used: OrderedDict[Key, float] = OrderedDict()
        self.running: dict[Key, _Running] = {}
        self.ends: list[tuple[float, int, _Running]] = []
        self.next_id = 1
        self.clock_s: float | None = None

    def fresh(self, num_ids: int) -> "array[int]":
        """Return ids that no prompt has had."""
        if self.next_id + num_ids > np.iinfo(np.int32).max:
            self.next_id = 1
        ids = array("i", range(self.next_id, self.next_id + num_ids))
        self.next_id += num_ids
        return ids


class Replay:
    """One cell: a fleet of nodes with the same settings.

    Args:
        budget_fraction, ttl_s: the settings of the cell.
        limits: for the size of a node's pool, and for what recomputing a lease would take.
        num_nodes: decode engines; a session has one of them, chosen by its number.
    """

    def __init__(self, budget_fraction: float, ttl_s: float, *, limits: Limits, num_nodes: int) -> None:
        self._settings = make_settings(budget_fraction, ttl_s)
        self._nodes = [_Node(self._settings, limits) for _ in range(num_nodes)]
        self._seen = Replayed(budget_fraction, ttl_s)
        self._num_started = 0
        self._leased = 0

    def run(self, rows: Rows, *, keep_rows: bool = False) -> Replayed:
        """Replay rows [num_turns], which must have times and be in their order."""
        seen = self._seen
        held_by_row = np.zeros(len(rows), dtype=np.int32)
        for index, row in enumerate(_lists(rows)):
            session, turn, model, start_s, end_s, prompt, output, shared, ends = row
            node = self._nodes[session % len(self._nodes)]
            self._advance(node, start_s)
            held = self._start(node, (_TENANT, str(session)), str(model), start_s, end_s, prompt, output, shared, ends)
            held_by_row[index] = held
            if turn > 1 and shared > 0:
                seen.num_turns += 1
                seen.reusable_tokens += shared
                seen.held_tokens += held
                seen.num_whole += held == shared
                seen.num_partial += 0 < held < shared
        last_s = float(rows["end_s"].max()) if len(rows) else 0.0
        for node in self._nodes:
            self._advance(node, last_s)
        seen.duration_s = last_s - float(rows["start_s"].min()) if len(rows) else 0.0
        seen.held_by_row = held_by_row if keep_rows else None
        return seen

    # ---------------------------------------------------------------- time

    def _advance(self, node: _Node, now_s: float) -> None:
        """Let what ends until `now_s` end, and count what leases hold meanwhile."""
        while node.ends and node.ends[0][0] <= now_s:
            end_s, _, running = heapq.heappop(node.ends)
            if running.is_live:
                self._hold_until(node, end_s)
                self._end(node, running, end_s)
        self._hold_until(node, now_s)
        retention_s = self._settings.session_retention_s
        while node.used:
            key, used_s = next(iter(node.used.items()))
            if used_s + retention_s > now_s:
                break
            del node.used[key]
            if key not in node.running:
                node.table.forget(key, now_s=now_s)
                node.gaps.forget(key)
                node.ids.pop(key, None)
                node.blocks.pop(key, None)

    def _hold_until(self, node: _Node, now_s: float) -> None:
        seen, step_s = self._seen, self._settings.default_ttl_s / _SWEEPS_PER_TTL
        clock_s = now_s if node.clock_s is None else node.clock_s
        while (leased := node.table.num_leased_blocks) and clock_s < now_s:
            until_s = min(now_s, clock_s + step_s)
            seen.leased_token_s += leased * CHUNK_TOKENS * (until_s - clock_s)
            clock_s = until_s
            node.table.sweep(now_s=until_s)
        node.clock_s = max(clock_s, now_s)

    # ---------------------------------------------------------------- a turn

    def _start(  # noqa: PLR0913, PLR0917 (a row, unpacked once: this is the hot loop)
        self,
        node: _Node,
        key: Key,
        model: str,
        start_s: float,
        end_s: float,
        prompt: int,
        output: int,
        shared: int,
        ends: int,
    ) -> int:
        """Begin a turn and give it blocks; return how many tokens of `shared` its session still holds."""
        if (earlier := node.running.get(key)) is not None:
            self._end(node, earlier, start_s)
        before = node.ids.get(key, array("i"))
        num_shared = min(shared // CHUNK_TOKENS, len(before))
        num_chunks = -(-(prompt + output) // CHUNK_TOKENS)
        ids = before[:num_shared] + node.fresh(max(0, num_chunks - num_shared))
        self._num_started += 1
        nonce = str(self._num_started)
        node.gaps.began(key, now_s=start_s)
        begun = node.table.begin(
            key, ids[: -(-prompt // CHUNK_TOKENS)], model, now_s=start_s, want_ticket=False, nonce=nonce
        )
        is_whole = begun.held_tokens > 0 and begun.matched_tokens >= shared // CHUNK_TOKENS
        held = shared if is_whole else begun.matched_tokens * CHUNK_TOKENS
        if held < shared:
            self._seen.reasons[begun.lease_reason or "no_room"] += 1
        own_ids = node.blocks.get(key, array("i"))[: begun.matched_tokens]
        block_ids = self._take(node, own_ids, len(ids), now_s=start_s)
        running = _Running(max(start_s, end_s), key, nonce, ids, block_ids, TOOL_PREFIX if ends == 1 else "stop")
        node.running[key], node.ids[key] = running, ids
        heapq.heappush(node.ends, (running.end_s, self._num_started, running))
        node.used[key] = running.end_s
        node.used.move_to_end(key)
        return held

    def _take(self, node: _Node, own_ids: "array[int]", num_blocks: int, *, now_s: float) -> "array[int]":
        """Return the blocks of a request, its session's own ones first; none where it does not fit."""
        pool = node.pool
        if own_ids:
            pool.pin(own_ids)
        num_missing = num_blocks - len(own_ids)
        num_short = num_missing - pool.num_free_blocks()
        if num_short > 0 and node.table.num_reclaimable(now_s=now_s, limit=num_short) >= num_short:
            self._seen.revoked_tokens += node.table.revoke(num_short, now_s=now_s) * CHUNK_TOKENS
        if num_missing > pool.num_free_blocks():
            self._seen.num_without_room += 1
            if own_ids:
                pool.unpin(own_ids)
            return array("i")
        return own_ids + pool.take(num_missing)

    def _end(self, node: _Node, running: _Running, now_s: float) -> None:
        """End a request: its blocks become its session's lease, as far as the budget allows."""
        key, table = running.key, node.table
        running.is_live = False
        del node.running[key]
        node.gaps.ended(key, running.ended_by, now_s=now_s)
        if running.block_ids:
            table.finish(running.nonce, running.block_ids, len(running.ids), running.ids, now_s=now_s)
            node.pool.unpin(running.block_ids)
            if table.is_open(running.nonce):
                info = table.settle(running.nonce, len(running.ids), ttl_s=None, now_s=now_s)
                node.blocks[key] = running.block_ids[: info.num_blocks]
        else:
            table.abandon(running.nonce, return_ticket=False, now_s=now_s)
        leased = sum(one.table.num_leased_blocks for one in self._nodes) * CHUNK_TOKENS
        self._seen.peak_leased_tokens = max(self._seen.peak_leased_tokens, leased)


def make_settings(budget_fraction: float, ttl_s: float) -> HomeSettings:
    """Return the server's settings of a cell: all others have their defaults, or make room for the two.

    Raises:
        ValueError: a value is outside the server's limits; the text names it.
    """
    default = HomeSettings()
    max_ttl_s = max(default.max_ttl_s, ttl_s)
    return HomeSettings(
        budget_fraction=budget_fraction,
        default_ttl_s=ttl_s,
        max_ttl_s=max_ttl_s,
        session_retention_s=max(default.session_retention_s, max_ttl_s),
    )


def _chunk_rates(limits: Limits) -> ConstantRates:
    """Return the hardware's rates with a chunk as the token."""
    return ConstantRates(
        prefill_tokens_per_s=1 / limits.linear_s_per_token / CHUNK_TOKENS,
        attention_tokens=limits.attention_tokens / CHUNK_TOKENS,
        fetch_bytes_per_s=limits.link.bytes_per_s,
        fetch_fixed_s=limits.fixed_s,
    )


def _lists(rows: Rows) -> Iterator[tuple[Any, ...]]:
    """Iterate rows as plain Python values, some at a time."""
    names = ["session", "turn", "model", "start_s", "end_s", "prompt", "output", "shared", "ends"]
    for start in range(0, len(rows), 4096):
        yield from zip(*(rows[name][start : start + 4096].tolist() for name in names), strict=True)
