"""Answers question (d), how TTFT would change, and says what each session would save.

In the limit: from `limits` alone, on idle engines, without queueing.
"""

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from .limits import Limits
from .stats import Floats, cdf, quantiles
from .turns import Rows

NEARLY_ALL: Final = 0.9
"""Of the later turns, that must tell their cache hits for the log to be a baseline."""


@dataclass(frozen=True, slots=True)
class TtftAnswer:
    """(d) How TTFT would change, in the limit: without queueing, on idle engines."""

    first_turn_s: dict[str, float] | None
    """Of a P that has nothing of the session: the same with and without reuse."""
    baselines: dict[str, dict[str, Any]]
    """`cold`, `warm` (and `logged`): what P finds in its own prefix cache now: nothing, the prompt before, or what
    the log says. Each has `now_s` and `reuse_s` of the later turns, `speedup`, the ratio per turn, and `num_turns`, how
    many of them tell."""
    measured_s: dict[str, float] | None
    """Of the later turns, where the log tells it."""
    num_measured: int
    """How many of them the log times."""
    session_gain: list[tuple[float, float]]
    """Distribution over sessions: part of all TTFT seconds saved, against the basis."""
    curves: dict[str, list[tuple[float, float]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Savings:
    """What each session would save; the input of the verdict."""

    basis: str
    """The baseline that counts: `logged` where nearly all later turns tell cache hits, else `cold`."""
    gains: dict[str, Floats]
    """By baseline: [num_sessions], part of the session's TTFT seconds saved, first turns included."""
    saved_s: Floats
    """[num_sessions], against the basis."""
    num_later_turns: int
    """That the basis rests on."""
    num_turns: npt.NDArray[np.int64]
    mean_prompt_tokens: Floats
    total_gain: dict[str, float]
    """By baseline: part of all TTFT seconds saved, first turns included."""


def ttft_pair(
    rows: Rows, limits: Limits, held: Any, present: Any, min_fetch_tokens: float | None = None
) -> tuple[Floats, Floats]:
    """Return the seconds to the first token of each row, without and with reuse.

    Args:
        rows: [num_rows].
        limits: the hardware.
        held: [num_rows], tokens that D still holds.
        present: [num_rows], tokens that P has in its own cache.
        min_fetch_tokens: fetch no less; None: the break-even length.
    """
    prompt = rows["prompt"].astype(np.float64)
    # The last token is always computed: its logits are the answer's first token.
    present = np.minimum(np.asarray(present, dtype=np.float64), np.maximum(prompt - 1, 0))
    held = np.minimum(np.asarray(held, dtype=np.float64), np.maximum(prompt - 1, 0))
    least = limits.break_even_tokens if min_fetch_tokens is None else min_fetch_tokens
    now = limits.compute_s(prompt, present)
    fetched = held - present
    does_fetch = (fetched > 0) & (fetched >= least)
    with_fetch = limits.fetch_s(np.maximum(fetched, 0)) + limits.compute_s(prompt, np.maximum(held, present))
    return now, np.where(does_fetch, with_fetch, now)


def ask_ttft(rows: Rows, held: Any, limits: Limits) -> tuple[TtftAnswer, Savings]:
    """Answer (d), and say what each session saves.

    Args:
        rows: turns that were replayed.
        held: [num_rows], tokens that D still held when each turn began.
        limits: the hardware.
    """
    is_later = rows["turn"] > 1
    present = {"cold": np.zeros(len(rows)), "warm": np.where(is_later, rows["repeated"], 0)}
    is_told = rows["cached"] >= 0
    if is_later.any() and is_told[is_later].mean() >= NEARLY_ALL:
        # A first turn that does not tell found nothing, as with the others; a later one is left out.
        present["logged"] = np.where(is_told, rows["cached"], np.where(is_later, np.nan, 0.0))
    baselines, curves, pairs = {}, {}, {}
    for name, tokens in present.items():
        now, then = pairs[name] = ttft_pair(rows, limits, held, tokens)
        baselines[name] = {
            "now_s": quantiles(now[is_later]),
            "reuse_s": quantiles(then[is_later]),
            "speedup": quantiles((now / np.maximum(then, 1e-9))[is_later]),
            "num_turns": int((~np.isnan(now[is_later])).sum()),
        }
        curves[f"{name}, now"], curves[f"{name}, with reuse"] = cdf(now[is_later]), cdf(then[is_later])
    savings = _savings(rows, pairs)
    answer = TtftAnswer(
        first_turn_s=quantiles(pairs["cold"][0][~is_later]),
        baselines=baselines,
        measured_s=quantiles(rows["ttft_s"][is_later]),
        num_measured=int((~np.isnan(rows["ttft_s"][is_later])).sum()),
        session_gain=cdf(savings.gains[savings.basis][savings.num_turns > 0]),
        curves=curves,
    )
    return answer, savings


def _savings(rows: Rows, pairs: dict[str, tuple[Floats, Floats]]) -> Savings:
    basis = "logged" if "logged" in pairs else "cold"
    num_later_turns = int(((rows["turn"] > 1) & ~np.isnan(pairs[basis][0])).sum())
    # A turn that does not tell counts on neither side.
    pairs = {name: (np.nan_to_num(now), np.nan_to_num(then)) for name, (now, then) in pairs.items()}
    sessions = rows["session"]
    num_turns = np.bincount(sessions)
    gains, saved = {}, {}
    for name, (now, then) in pairs.items():
        total = np.bincount(sessions, weights=now)
        saved[name] = np.bincount(sessions, weights=now - then).astype(np.float64)
        gains[name] = saved[name] / np.maximum(total, 1e-12)
    prompts = np.bincount(sessions, weights=rows["prompt"])
    return Savings(
        basis=basis,
        gains=gains,
        saved_s=saved[basis],
        num_later_turns=num_later_turns,
        num_turns=num_turns,
        mean_prompt_tokens=prompts / np.maximum(num_turns, 1),
        total_gain={name: 1 - float(b.sum() / max(a.sum(), 1e-12)) for name, (a, b) in pairs.items()},
    )
