"""The four questions to ask before adopting, asked of the rows of turns. Numbers only; `verdict` judges them.

(a) `ask_reuse` · (b) `ask_link` · (c) `ask_holding`, over `replay` · (d) `ttft.ask_ttft`. Shares are parts of 1, times
seconds, sizes bytes or tokens, as the names say. Percentiles are None where there is nothing to rank.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from .hardware import LINKS, MODELS
from .limits import Limits
from .replay import Replay, Replayed
from .stats import Floats, cdf, quantiles
from .ttft import ttft_pair
from .turns import Rows, Spool

_TURN_BINS: Final = (2, 3, 4, 6, 9, 13, 19, 28, 41, 61, 91, 136, 1 << 31)
_MIN_S: Final = 1e-9  # of a prompt without tokens; to divide by
_HISTORIES: Final = tuple(int(256 * 2 ** (i / 2)) for i in range(21))


# -------------------------------------------------------------------- question a


@dataclass(frozen=True, slots=True)
class Reuse:
    """(a) What share of each prompt repeats the turn before, and how it grows."""

    num_sessions: int
    num_turns: int
    num_repeat_turns: int
    """Turns with one before them in their session."""
    turns_per_session: dict[str, float] | None
    prompt_tokens: dict[str, float] | None
    repeated_share: dict[str, float] | None
    """Of each later prompt: what the prompt before already had."""
    held_share: dict[str, float] | None
    """Of each later prompt: what the prompt before and its answer already had; D holds both."""
    new_tokens: dict[str, float] | None
    total_repeated_share: float
    """Of all prompt tokens of later turns."""
    total_held_share: float
    append_only_share: float
    """Of the later turns, those that keep the whole prompt before."""
    by_turn: list[dict[str, float]]
    """Turns `first` to `last`: how many, and the median tokens and shares."""


def ask_reuse(rows: Rows, sessions: npt.NDArray[np.int32]) -> Reuse:
    """Answer (a).

    Args:
        rows: of all turns, or of enough of them.
        sessions: [num_turns], the session of every turn.
    """
    later = rows[rows["turn"] > 1]
    prompts = np.maximum(later["prompt"], 1)
    held, repeated = later["shared"] / prompts, later["repeated"] / prompts
    total = max(1, int(later["prompt"].sum()))
    by_turn = []
    for first, end in pairwise(_TURN_BINS):
        chosen = (later["turn"] >= first) & (later["turn"] < end)
        if not chosen.any():
            continue
        low, mid, high = np.quantile(held[chosen], (0.25, 0.5, 0.75))
        by_turn.append(
            {
                "first": first,
                "last": min(end - 1, int(later["turn"].max())),
                "num_turns": int(chosen.sum()),
                "held_share_p25": float(low),
                "held_share_p50": float(mid),
                "held_share_p75": float(high),
                "prompt_tokens_p50": float(np.median(later["prompt"][chosen])),
                "held_tokens_p50": float(np.median(later["shared"][chosen])),
            }
        )
    return Reuse(
        num_sessions=int(sessions.max()) + 1,
        num_turns=len(sessions),
        num_repeat_turns=len(sessions) - int(sessions.max()) - 1,
        turns_per_session=quantiles(np.bincount(sessions)),
        prompt_tokens=quantiles(rows["prompt"]),
        repeated_share=quantiles(repeated),
        held_share=quantiles(held),
        new_tokens=quantiles(later["prompt"] - later["shared"]),
        total_repeated_share=float(later["repeated"].sum() / total),
        total_held_share=float(later["shared"].sum() / total),
        append_only_share=float((later["repeated"] >= later["before"]).mean()) if len(later) else 0.0,
        by_turn=by_turn,
    )


# -------------------------------------------------------------------- question b


@dataclass(frozen=True, slots=True)
class LinkAnswer:
    """(b) Whether the link suffices."""

    fetch_bytes: dict[str, float] | None
    """A turn, of those that could fetch."""
    fetch_cdf: list[tuple[float, float]]
    """Of bytes."""
    fetch_s: dict[str, float] | None
    break_even_tokens: float
    """From this history on fetching is faster than computing."""
    above_break_even_share: float
    """Of the later turns."""
    table: list[dict[str, Any]]
    """One row per model and link."""
    curves: dict[str, list[tuple[float, float]]]
    """Seconds by history length, for the chosen model: computing it, and fetching it over each link."""


def ask_link(rows: Rows, limits: Limits) -> LinkAnswer:
    """Answer (b)."""
    shared = rows["shared"][(rows["turn"] > 1) & (rows["shared"] > 0)].astype(np.float64)
    later = max(1, int((rows["turn"] > 1).sum()))
    table = []
    others = () if limits.is_measured else MODELS
    for model in MODELS if limits.model in MODELS else (limits.model, *others):
        for link in LINKS if limits.link in LINKS else (limits.link, *LINKS):
            if model.name.startswith("smollm") and limits.model != model:
                continue
            one = replace(limits, model=model, link=link)
            table.append(
                {
                    "model": model.name,
                    "link": link.name,
                    "num_gpus": one.num_gpus,
                    "kv_bytes_per_token": model.kv_bytes_per_token,
                    "compute_us_per_token": one.linear_s_per_token * 1e6,
                    "fetch_us_per_token": one.fetch_s_per_token * 1e6,
                    "break_even_tokens": one.break_even_tokens,
                    "above_break_even_share": float((shared >= one.break_even_tokens).sum() / later),
                    "speedup_p50": _median_speedup(rows, one),
                }
            )
    histories = np.array([h for h in _HISTORIES if h <= 2 * limits.model.max_context_tokens], dtype=np.float64)
    curves = {"compute": _points(histories, limits.compute_s(histories))}
    for link in LINKS if limits.link in LINKS else (limits.link, *LINKS):
        one = replace(limits, link=link)
        curves[link.name] = _points(histories, one.fetch_s(histories))
    return LinkAnswer(
        fetch_bytes=quantiles(shared * limits.model.kv_bytes_per_token),
        fetch_cdf=cdf(shared * limits.model.kv_bytes_per_token),
        fetch_s=quantiles(limits.fetch_s(shared)),
        break_even_tokens=limits.break_even_tokens,
        above_break_even_share=float((shared >= limits.break_even_tokens).sum() / later),
        table=table,
        curves=curves,
    )


def _points(x: Floats, y: Floats) -> list[tuple[float, float]]:
    return list(zip(x.tolist(), y.tolist(), strict=True))


def _median_speedup(rows: Rows, limits: Limits) -> float | None:
    later = rows[rows["turn"] > 1]
    if not len(later):
        return None
    now, then = ttft_pair(later, limits, later["shared"], np.zeros(len(later)), 0)
    return float(np.median(now / np.maximum(then, _MIN_S)))


# -------------------------------------------------------------------- question c

FEW_TURNS: Final = 20
"""Fewer are no basis for an answer."""


@dataclass(frozen=True, slots=True)
class Holding:
    """(c) How long decode engines would hold the cache, in how much memory, and how often it would be gone."""

    num_nodes: int
    pool_tokens: int
    """Of one node."""
    num_replayed: int
    is_partial: bool
    """Only the first turns were replayed; see `--replay-turns`."""
    peak_running_tokens: int
    gap_s: dict[str, float] | None
    gap_after_tool_s: dict[str, float] | None
    gap_after_stop_s: dict[str, float] | None
    """Where the log tells how turns ended."""
    gap_cdf: list[tuple[float, float]]
    grid: list[Replayed]
    best: Replayed | None
    """The cheapest cell that keeps nearly as much as any."""


def ask_holding(
    spool: Spool,
    limits: Limits,
    *,
    budgets: Sequence[float],
    ttls_s: Sequence[float],
    num_nodes: int | None,
    max_turns: int,
    on_cell: Callable[[int, int], None] = lambda _done, _total: None,
) -> tuple[Holding, Rows]:
    """Answer (c); return it with the rows that were replayed, in the order of time.

    Args:
        spool: all turns.
        limits: for the size of a node's pool.
        budgets: parts of the pool that leases may hold.
        ttls_s: lives of a lease.
        num_nodes: decode engines; None: as many as the running requests fill half of.
        max_turns: replay no more than the first so many.
        on_cell: told how many cells of how many are done.
    """
    starts = spool.column("start_s")
    timed = np.flatnonzero(~np.isnan(starts))
    if len(timed) < min(FEW_TURNS, spool.num_rows / 2):
        timed = timed[:0]  # so few would speak for all the others
    # A session's turns stay in their order also where its clock does not.
    starts = _monotonic(starts[timed], spool.column("session")[timed])
    ordered = spool.pick(timed[np.argsort(starts, kind="stable")[:max_turns]])
    gaps, after = spool.column("gap_s"), spool.column("after")
    pool_tokens = max(limits.pool_tokens, 1)
    peak = _peak_running(ordered, pool_tokens)
    nodes = num_nodes or max(1, -(-2 * peak // pool_tokens))
    grid: list[Replayed] = []
    cells = [(budget, ttl_s) for budget in budgets for ttl_s in ttls_s] if len(ordered) else []
    for done, (budget, ttl_s) in enumerate(cells):
        grid.append(Replay(budget, ttl_s, limits=limits, num_nodes=nodes).run(ordered))
        on_cell(done + 1, len(cells))
    best = choose_cell(grid)
    if best is not None:
        # Once more, for what each turn found.
        again = Replay(best.budget_fraction, best.ttl_s, limits=limits, num_nodes=nodes)
        best = again.run(ordered, keep_rows=True)
    holding = Holding(
        num_nodes=nodes,
        pool_tokens=pool_tokens,
        num_replayed=len(ordered),
        is_partial=len(ordered) < len(timed),
        peak_running_tokens=peak,
        gap_s=quantiles(gaps),
        gap_after_tool_s=quantiles(gaps[after == 1]),
        gap_after_stop_s=quantiles(gaps[after == 0]),
        gap_cdf=cdf(gaps),
        grid=grid,
        best=best,
    )
    return holding, ordered


NEARLY_ALL: Final = 0.9
"""Of what the best cell keeps; the last few percent cost the most memory."""


def choose_cell(grid: Sequence[Replayed]) -> Replayed | None:
    """Return the cell that keeps nearly as much as any, with the shortest life of a lease; then the least budget.

    A short life costs the least where a session never returns, and that is what a longer one holds most of.
    """
    if not grid:
        return None
    enough = NEARLY_ALL * max(cell.held_tokens for cell in grid)
    good = [cell for cell in grid if cell.held_tokens >= enough]
    return min(good, key=lambda cell: (cell.ttl_s, cell.budget_fraction))


def _monotonic(starts: Floats, sessions: npt.NDArray[np.int32]) -> Floats:
    """Return start times [num_turns], in the order of the log, that never go back within a session."""
    order = np.argsort(sessions, kind="stable")
    grouped, by_session = starts[order], sessions[order]
    begins = np.flatnonzero(by_session[1:] != by_session[:-1]) + 1
    for begin, end in pairwise([0, *begins.tolist(), len(starts)]):
        np.maximum.accumulate(grouped[begin:end], out=grouped[begin:end])
    monotonic = np.empty_like(starts)
    monotonic[order] = grouped
    return monotonic


def _peak_running(rows: Rows, pool_tokens: int) -> int:
    """Return the most tokens that requests hold at one time, each of them no more than a pool."""
    if not len(rows):
        return 0
    sizes = np.minimum(rows["prompt"].astype(np.int64) + rows["output"], pool_tokens)
    at = np.concatenate([rows["start_s"], np.maximum(rows["end_s"], rows["start_s"])])
    change = np.concatenate([sizes, -sizes])
    # Ends before starts of the same moment.
    return int(np.cumsum(change[np.lexsort((change, at))]).max())
