"""A decode engine's memory: the server's own lease table, over a block pool that is only numbers.

The life of a turn: `begin` (what does its session still hold?) · `admit` (its request gets blocks, from leases where
the pool is short, as on the server) · `end` (the blocks become the session's lease, as far as the budget allows). A
block is a chunk of tokens, and a chunk's id stands for all up to its end. Not modelled: blocks that sessions share,
and what an ended lease leaves in the prefix cache.
"""

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Final

import numpy as np

from server_ext.core.gaps import GapModel
from server_ext.core.leases import LeaseTable
from server_ext.core.policy import LeastValueFirst
from server_ext.core.rates import ConstantRates
from server_ext.core.records import Begun, Key
from server_ext.core.settings import HomeSettings

if TYPE_CHECKING:
    from server_ext.core.rates import Rates

_FEW: Final = 48
"""Blocks up to which a loop is faster than numpy."""
_SWEEPS_PER_TTL: Final = 16
"""An engine that does nothing else looks so often for leases that have ended."""
_MAX_ID: Final = int(np.iinfo(np.int32).max)


class NumberPool:
    """Counted references on numbered blocks (`server_ext.core.ports.BlockPins`)."""

    def __init__(self, num_blocks: int) -> None:
        # The same memory twice: a loop is faster for a few blocks, numpy for many.
        self._references = array("i", bytes(4 * num_blocks))
        self._references_view = np.frombuffer(self._references, dtype=np.int32)
        self._free = array("i", range(num_blocks))

    def pin(self, block_ids: Sequence[int]) -> None:
        """Take a reference on each; blocks that nobody holds come from `take` only."""
        if len(block_ids) > _FEW:
            self._references_view[np.asarray(block_ids)] += 1
            return
        references = self._references
        for block_id in block_ids:
            references[block_id] += 1

    def unpin(self, block_ids: Sequence[int]) -> None:
        """Give back a reference on each."""
        if len(block_ids) > _FEW:
            ids = np.asarray(block_ids, dtype=np.int32)
            self._references_view[ids] -= 1
            self._free.frombytes(ids[self._references_view[ids] == 0].tobytes())
            return
        references, free = self._references, self._free
        for block_id in block_ids:
            left = references[block_id] = references[block_id] - 1
            if not left:
                free.append(block_id)

    def take(self, num_blocks: int) -> "array[int]":
        """Return so many free blocks, with a reference on each; there must be as many."""
        if not num_blocks:
            return array("i")
        ids = self._free[-num_blocks:]
        del self._free[-num_blocks:]
        self.pin(ids)
        return ids

    def num_references(self, block_id: int) -> int:
        """Return all references on a block."""
        return self._references[block_id]

    def seals(self, block_ids: Sequence[int]) -> list[object | None]:
        """Seal nothing: a replay does not know what other requests would have written over."""
        return [None] * len(block_ids)

    def num_free_blocks(self) -> int:
        """Return the number of free blocks."""
        return len(self._free)

    def num_total_blocks(self) -> int:
        """Return the number of blocks."""
        return len(self._references)


@dataclass(slots=True, eq=False)
class Request:
    """A turn's request on its engine."""

    key: Key
    nonce: str
    ids: "array[int]"
    """[chunks of the prompt and the answer]."""
    begun: Begun
    held_tokens: int
    """Of those that it could reuse, still held when it began."""
    block_ids: "array[int]"
    """[chunks]; empty until it is admitted."""
    num_revocations: int
    """Of its engine when it began: while there are no more, all that matched is still there."""


class DecodeMemory:
    """The pool, the lease table and the gaps of one decode engine.

    Args:
        settings: budgets and times; counts of tokens in them are counts of chunks here.
        rates: what computing chunks takes, for the order of revocation.
        pool_tokens: tokens whose KV fits.
        chunk_tokens: tokens per block.
    """

    def __init__(self, settings: HomeSettings, rates: "Rates", *, pool_tokens: int, chunk_tokens: int) -> None:
        self.pool = NumberPool(max(1, pool_tokens // chunk_tokens))
        self.chunk_tokens = chunk_tokens
        self.revoked_tokens = 0
        self._num_revocations = 0
        self._gaps = GapModel(max_sessions=settings.max_sessions)
        numbers = count()
        self._swept_s = 0.0
        self._sweep_s = settings.default_ttl_s / _SWEEPS_PER_TTL
        self._retention_s = settings.session_retention_s
        self.table = LeaseTable(
            self.pool,
            settings,
            block_size=1,  # a chunk is the unit here: its id stands for its tokens
            max_request_blocks=0,
            new_ticket_id=lambda: f"ticket-{next(numbers)}",
            order=LeastValueFirst(self._gaps, rates, self.pool.num_references, block_size=1),
        )
        self._blocks: dict[Key, array[int]] = {}
        self._ids: dict[Key, array[int]] = {}
        self._used: OrderedDict[Key, float] = OrderedDict()
        """When the last turn of each session that has none open ended."""
        self._next_id = 1

    @property
    def leased_tokens(self) -> int:
        """Tokens that leases hold."""
        return self.table.num_leased_blocks * self.chunk_tokens

    def begin(
        self,
        key: Key,
        fingerprint: str,
        nonce: str,
        *,
        prompt_tokens: int,
        output_tokens: int,
        shared_tokens: int,
        want_ticket: bool,
        now_s: float,
    ) -> Request:
        """Begin a turn of a session that has none open.

        Args:
            key: the session.
            fingerprint: of the model.
            nonce: the turn's name.
            prompt_tokens: its length.
            output_tokens: of its answer.
            shared_tokens: of the prompt, that the session's last prompt and answer had already.
            want_ticket: whether a prefill engine is to read what is held.
            now_s: simulated seconds.
        """
        self.catch_up(now_s)
        self._forget_old(now_s)
        self._used.pop(key, None)
        before, chunk = self._ids.get(key, array("i")), self.chunk_tokens
        num_shared = min(shared_tokens // chunk, len(before))
        num_chunks = -(-(prompt_tokens + output_tokens) // chunk)
        ids = before[:num_shared] + self._fresh(max(0, num_chunks - num_shared))
        self._gaps.began(key, now_s=now_s)
        begun = self.table.begin(
            key, ids[: -(-prompt_tokens // chunk)], fingerprint, now_s=now_s, want_ticket=want_ticket, nonce=nonce
        )
        is_whole = begun.held_tokens > 0 and begun.matched_tokens >= shared_tokens // chunk
        held = shared_tokens if is_whole else begun.matched_tokens * chunk
        self._ids[key] = ids
        return Request(key, nonce, ids, begun, held, array("i"), self._num_revocations)

    def admit(self, request: Request, *, now_s: float) -> bool:
        """Give a request its blocks, those of its session's lease first; return False where it does not fit."""
        pool, num_matched = self.pool, request.begun.matched_tokens
        if num_matched and request.num_revocations != self._num_revocations:
            num_matched = min(num_matched, self.table.info(request.key, now_s=now_s).num_blocks)
        own_ids = self._blocks[request.key][:num_matched] if num_matched else array("i")
        if own_ids:
            pool.pin(own_ids)
        num_missing = len(request.ids) - num_matched
        num_short = num_missing - pool.num_free_blocks()
        if num_short > 0:
            num_freed = self.table.revoke(num_short, now_s=now_s, all_or_nothing=True)
            self.revoked_tokens += num_freed * self.chunk_tokens
            self._num_revocations += 1
        if num_missing > pool.num_free_blocks():
            if own_ids:
                pool.unpin(own_ids)
            return False
        request.block_ids = own_ids + pool.take(num_missing)
        return True

    def end(self, request: Request, ended_by: str, *, now_s: float) -> None:
        """End a request: its blocks become its session's lease; without blocks the lease before stays."""
        key, table = request.key, self.table
        self._gaps.ended(key, ended_by, now_s=now_s)
        if request.block_ids:
            table.finish(request.nonce, request.block_ids, len(request.ids), request.ids, now_s=now_s)
            self.pool.unpin(request.block_ids)
            if table.is_open(request.nonce):
                info = table.settle(request.nonce, len(request.ids), ttl_s=None, now_s=now_s)
                self._blocks[key] = request.block_ids[: info.num_blocks]
        else:
            table.abandon(request.nonce, return_ticket=True, now_s=now_s)
        self._used[key] = self._swept_s = now_s

    def catch_up(self, now_s: float) -> None:
        """Sweep the table at moments in between where it was left alone for long, so that leases count as they end."""
        while self.table.num_leased_blocks and self._swept_s + self._sweep_s < now_s:
            self._swept_s += self._sweep_s
            self.table.sweep(now_s=self._swept_s)
        self._swept_s = now_s

    def forget(self, key: Key, *, now_s: float) -> None:
        """Drop all that is known of a session without an open turn."""
        self.table.forget(key, now_s=now_s)
        self._gaps.forget(key)
        self._ids.pop(key, None)
        self._blocks.pop(key, None)
        self._used.pop(key, None)

    def _forget_old(self, now_s: float) -> None:
        """Drop the sessions that ended their last turn too long ago."""
        while self._used:
            key, used_s = next(iter(self._used.items()))
            if used_s + self._retention_s > now_s:
                break
            self.forget(key, now_s=now_s)

    def _fresh(self, num_ids: int) -> "array[int]":
        """Return ids that no prompt has had."""
        if self._next_id + num_ids > _MAX_ID:
            self._next_id = 1
        ids = array("i", range(self._next_id, self._next_id + num_ids))
        self._next_id += num_ids
        return ids


def make_settings(budget_fraction: float, ttl_s: float) -> HomeSettings:
    """Return the server's settings with these two: all others have their defaults, or make room for them.

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


def chunk_rates(linear_s_per_token: float, attention_tokens: float, chunk_tokens: int) -> ConstantRates:
    """Return what computing takes, with a chunk as the token."""
    return ConstantRates(
        prefill_tokens_per_s=1 / linear_s_per_token / chunk_tokens, attention_tokens=attention_tokens / chunk_tokens
    )
