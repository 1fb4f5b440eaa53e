"""A decode engine's memory: the server's own lease table, over a block pool that is only numbers.

The life of a turn: `begin` (what does its session still hold?) · `admit` (its request gets blocks, from leases where
the pool is short, as on the server) · `end` (the blocks become the session's lease, as far as the budget allows). A
block is a chunk of tokens, and a chunk's id stands for all up to its end. What nobody holds stays in the prefix cache
until it is taken. Not modelled: blocks that sessions share.
"""

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import count
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from server_ext.core.errors import LeaseLost
from server_ext.core.gaps import GapModel
from server_ext.core.leases import LeaseTable
from server_ext.core.policy import LeastValueFirst
from server_ext.core.rates import ConstantRates
from server_ext.core.records import Begun, Key
from server_ext.core.settings import HomeSettings

if TYPE_CHECKING:
    from server_ext.core.leases import WantsTicket
    from server_ext.core.rates import Rates

_FEW: Final = 48
"""Blocks up to which a loop is faster than numpy."""
_MAX_ID: Final = int(np.iinfo(np.int32).max)
_NONE: "Final[array[int]]" = array("i")
"""Nobody changes it."""


class NumberPool:
    """Counted references on numbered blocks (`server_ext.core.ports.BlockPins`).

    As in vLLM, free blocks keep what is in them until they are taken, and those that were freed first are taken first.
    """

    def __init__(self, num_blocks: int) -> None:
        # The same memory twice: a loop is faster for a few blocks, numpy for many.
        self._references = array("i", bytes(4 * num_blocks))
        self._references_view = np.frombuffer(self._references, dtype=np.int32)
        self._free = OrderedDict.fromkeys(range(num_blocks))
        self._seals: list[object | None] = [None] * num_blocks

    def pin(self, block_ids: Sequence[int]) -> None:
        """Take a reference on each, of those that are free too."""
        references = self._references
        if len(block_ids) > _FEW:
            ids = np.asarray(block_ids, dtype=np.int32)
            for block_id in ids[self._references_view[ids] == 0].tolist():
                del self._free[block_id]
            self._references_view[ids] += 1
            return
        for block_id in block_ids:
            if not references[block_id]:
                del self._free[block_id]
            references[block_id] += 1

    def unpin(self, block_ids: Sequence[int]) -> None:
        """Give back a reference on each."""
        references, free = self._references, self._free
        if len(block_ids) > _FEW:
            ids = np.asarray(block_ids, dtype=np.int32)
            self._references_view[ids] -= 1
            free.update(dict.fromkeys(ids[self._references_view[ids] == 0].tolist()))
            return
        for block_id in block_ids:
            left = references[block_id] = references[block_id] - 1
            if not left:
                free[block_id] = None

    def take(self, num_blocks: int) -> "tuple[array[int], object]":
        """Return so many free blocks, with a reference on each, and their new seal; there must be as many."""
        pop, references, seals = self._free.popitem, self._references, self._seals
        seal, ids = object(), array("i")
        for _ in range(num_blocks):
            block_id = pop(last=False)[0]
            ids.append(block_id)
            references[block_id] = 1
            seals[block_id] = seal
        return ids, seal

    def num_references(self, block_id: int) -> int:
        """Return all references on a block."""
        return self._references[block_id]

    def seals(self, block_ids: Sequence[int]) -> list[object | None]:
        """Return the seals of blocks: each is that of its last `take`."""
        return list(map(self._seals.__getitem__, block_ids))

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
    """Of those that it could reuse, held by a lease when it began."""
    cached_tokens: int
    """Of the same, in the engine's prefix cache, leased or not."""
    num_shared: int
    """Leading chunks that the session's last turn had too."""
    block_ids: "array[int]"
    """[chunks]; empty until it is admitted."""
    seals: list[object | None]
    """[chunks], of these blocks."""


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
        self._gaps = GapModel(max_sessions=settings.max_sessions)
        numbers = count()
        self._retention_s = settings.session_retention_s
        self.table = LeaseTable(
            self.pool,
            settings,
            block_size=1,  # a chunk is the unit here: its id stands for its tokens
            max_request_blocks=0,
            new_ticket_id=lambda: f"ticket-{next(numbers)}",
            order=LeastValueFirst(self._gaps, rates, self.pool.num_references, block_size=1),
        )
        self._blocks: dict[Key, tuple[array[int], list[object | None]]] = {}
        """Of each session's last request, with their seals."""
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
        want_ticket: "bool | WantsTicket",
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
            want_ticket: whether a prefill engine is to read what is held, or what says so (in tokens).
            now_s: simulated seconds.
        """
        self.table.catch_up(now_s=now_s)
        self._forget_old(now_s)
        self._used.pop(key, None)
        before, chunk = self._ids.get(key, _NONE), self.chunk_tokens
        num_shared = min(shared_tokens // chunk, len(before))
        num_chunks = -(-(prompt_tokens + output_tokens) // chunk)
        ids = before[:num_shared]
        if num_chunks > num_shared:
            ids += self._fresh(num_chunks - num_shared)
        self._gaps.began(key, now_s=now_s)
        wants = want_ticket if isinstance(want_ticket, bool) else _in_chunks(want_ticket, chunk)
        begun = self.table.begin(
            key, ids[: -(-prompt_tokens // chunk)], fingerprint, now_s=now_s, want_ticket=wants, nonce=nonce
        )
        self._ids[key] = ids
        # A last chunk that is not full counts where all before it is there.
        enough = shared_tokens // chunk if num_shared else _MAX_ID
        held = begun.matched_tokens
        # What its lease holds nobody took.
        cached = num_shared if held >= num_shared else len(self._cached(key, num_shared)[0])
        held = shared_tokens if held >= enough else held * chunk
        cached = shared_tokens if cached >= enough else cached * chunk
        return Request(key, nonce, ids, begun, held, max(held, cached), num_shared, _NONE, [])

    def admit(self, request: Request, *, now_s: float) -> bool:
        """Give a request its blocks, those that the prefix cache has first; return False where it does not fit."""
        pool = self.pool
        own_ids, own_seals = self._cached(request.key, request.num_shared)
        if own_ids:
            pool.pin(own_ids)
        num_missing = len(request.ids) - len(own_ids)
        num_short = num_missing - pool.num_free_blocks()
        if num_short > 0:
            num_freed = self.table.revoke(num_short, now_s=now_s, all_or_nothing=True)
            self.revoked_tokens += num_freed * self.chunk_tokens
            if num_freed < num_short:
                if own_ids:
                    pool.unpin(own_ids)
                return False
        new_ids, seal = pool.take(num_missing)
        request.block_ids = own_ids + new_ids
        request.seals = own_seals + [seal] * num_missing
        return True

    def end(self, request: Request, ended_by: str, *, now_s: float) -> None:
        """End a request: its blocks become its session's lease; without blocks the lease before stays."""
        key, table = request.key, self.table
        table.catch_up(now_s=now_s)
        self._gaps.ended(key, ended_by, now_s=now_s)
        if request.block_ids:
            is_pinned = table.finish(request.nonce, request.block_ids, len(request.ids), request.ids, now_s=now_s)
            self.pool.unpin(request.block_ids)
            if is_pinned:
                table.settle(request.nonce, len(request.ids), ttl_s=None, now_s=now_s)
            self._blocks[key] = request.block_ids, request.seals
        else:
            table.abandon(request.nonce, return_ticket=True, now_s=now_s)
        self._used[key] = now_s

    def return_ticket(self, ticket_id: str, *, now_s: float) -> None:
        """Give a ticket back; without effect where its time was over."""
        self.table.catch_up(now_s=now_s)
        self.table.return_ticket(ticket_id, now_s=now_s)

    def extend(self, key: Key, ttl_s: float, *, now_s: float) -> None:
        """Keep a session's lease for longer, as its agent asks; without effect where there is none."""
        with suppress(LeaseLost):
            self.table.extend(key, ttl_s, now_s=now_s)

    def forget(self, key: Key, *, now_s: float) -> None:
        """Drop all that is known of a session without an open turn."""
        self.table.forget(key, now_s=now_s)
        self._gaps.forget(key)
        self._ids.pop(key, None)
        self._blocks.pop(key, None)
        self._used.pop(key, None)

    def _cached(self, key: Key, num_chunks: int) -> "tuple[array[int], list[object | None]]":
        """Return those of the first blocks of a session's last request that still have what was computed, sealed.

        Args:
            key: the session.
            num_chunks: how many of the first blocks are asked for.
        """
        found = self._blocks.get(key)
        if found is None or not num_chunks:
            return _NONE, []
        block_ids, before = found[0][:num_chunks], found[1][:num_chunks]
        now = self.pool.seals(block_ids)
        if now != before:
            num_intact = next(i for i, pair in enumerate(zip(before, now, strict=True)) if pair[0] is not pair[1])
            return block_ids[:num_intact], before[:num_intact]
        return block_ids, before

    def _forget_old(self, now_s: float) -> None:
        """Drop the sessions that ended their last turn too long ago."""
        used = self._used
        while used:
            key = next(iter(used))
            if used[key] + self._retention_s > now_s:
                break
            self.forget(key, now_s=now_s)

    def _fresh(self, num_ids: int) -> "array[int]":
        """Return ids that no prompt has had."""
        if self._next_id + num_ids > _MAX_ID:
            self._next_id = 1
        ids = array("i", range(self._next_id, self._next_id + num_ids))
        self._next_id += num_ids
        return ids


def _in_chunks(wants: "WantsTicket", chunk_tokens: int) -> "WantsTicket":
    def answer(num_matched: int, diverged_at: int | None) -> bool:
        return wants(num_matched * chunk_tokens, None if diverged_at is None else diverged_at * chunk_tokens)

    return answer


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


def settings_to_write(budget_fraction: float, ttl_s: float) -> dict[str, Any]:
    """Return what to write under `kv_connector_extra_config.bidikv` for the settings of `make_settings`.

    The two, and what else has to leave its default for their sake.
    """
    made, default = asdict(make_settings(budget_fraction, ttl_s)), asdict(HomeSettings())
    asked = ("budget_fraction", "default_ttl_s")
    return {name: value for name, value in made.items() if name in asked or value != default[name]}


def chunk_rates(linear_s_per_token: float, attention_tokens: float, chunk_tokens: int) -> ConstantRates:
    """Return what computing takes, with a chunk as the token."""
    return ConstantRates(
        prefill_tokens_per_s=1 / linear_s_per_token / chunk_tokens, attention_tokens=attention_tokens / chunk_tokens
    )
