"""Replays turns through the server's own lease table (`memory`), without waiting.

One replay answers one cell of the grid: with this budget and this life of a lease, what is left when the next
turn comes? Requests hold their blocks from start to end. Not modelled beside what `memory` leaves out: waiting
(a request that does not fit runs without blocks and leaves no lease) and tickets.
"""

import heapq
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from server_ext.core.gaps import TOOL_PREFIX
from server_ext.core.records import Key
from server_ext.core.settings import HomeSettings

from .limits import Limits
from .memory import DecodeMemory, Request, chunk_rates, make_settings
from .requests import CHUNK_TOKENS
from .turns import Rows

# Between turns the table is swept so often within a lease's life, so that ended leases stop counting in time.
_SWEEPS_PER_TTL: Final = 4
_TENANT: Final = "logs"


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


@dataclass(slots=True, eq=False)
class _Running:
    end_s: float
    request: Request
    ended_by: str
    is_live: bool = True


class _Node:
    """One decode engine."""

    def __init__(self, settings: HomeSettings, limits: Limits) -> None:
        rates = chunk_rates(limits.linear_s_per_token, limits.attention_tokens, CHUNK_TOKENS)
        self.memory = DecodeMemory(settings, rates, pool_tokens=limits.pool_tokens, chunk_tokens=CHUNK_TOKENS)
        self.running: dict[Key, _Running] = {}
        self.ends: list[tuple[float, int, _Running]] = []
        self.clock_s: float | None = None


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
        # What is longer has no room either; nothing is made of the length that a log claims.
        self._most_tokens = max(limits.pool_tokens, CHUNK_TOKENS) + CHUNK_TOKENS
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
            seen.revoked_tokens += node.memory.revoked_tokens
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

    def _hold_until(self, node: _Node, now_s: float) -> None:
        seen, step_s = self._seen, self._settings.default_ttl_s / _SWEEPS_PER_TTL
        clock_s = now_s if node.clock_s is None else node.clock_s
        memory = node.memory
        while (leased := memory.leased_tokens) and clock_s < now_s:
            until_s = min(now_s, clock_s + step_s)
            if until_s <= clock_s:
                until_s = now_s  # so far from 0 a step is less than the clock can tell
            seen.leased_token_s += leased * (until_s - clock_s)
            clock_s = until_s
            memory.table.sweep(now_s=until_s)
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
        self._num_started += 1
        memory = node.memory
        request = memory.begin(
            key,
            model,
            str(self._num_started),
            prompt_tokens=min(prompt, self._most_tokens),
            output_tokens=min(output, self._most_tokens),
            shared_tokens=shared,
            want_ticket=False,
            now_s=start_s,
        )
        if request.held_tokens < shared:
            self._seen.reasons[request.begun.lease_reason or "no_room"] += 1
        if not memory.admit(request, now_s=start_s):
            self._seen.num_without_room += 1
        running = _Running(max(start_s, end_s), request, TOOL_PREFIX if ends == 1 else "stop")
        node.running[key] = running
        heapq.heappush(node.ends, (running.end_s, self._num_started, running))
        return request.held_tokens

    def _end(self, node: _Node, running: _Running, now_s: float) -> None:
        """End a request: its blocks become its session's lease, as far as the budget allows."""
        running.is_live = False
        del node.running[running.request.key]
        node.memory.end(running.request, running.ended_by, now_s=now_s)
        leased = sum(one.memory.leased_tokens for one in self._nodes)
        self._seen.peak_leased_tokens = max(self._seen.peak_leased_tokens, leased)


def _lists(rows: Rows) -> Iterator[tuple[Any, ...]]:
    """Iterate rows as plain Python values, some at a time."""
    names = ["session", "turn", "model", "start_s", "end_s", "prompt", "output", "shared", "ends"]
    for start in range(0, len(rows), 4096):
        yield from zip(*(rows[name][start : start + 4096].tolist() for name in names), strict=True)
