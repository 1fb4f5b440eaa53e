"""Fits rates to what turns on real engines took. Pure; `server_ext.cli` runs the turns."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

import numpy as np

from server_ext.analysis.least_error import fit_costs

from .rates import FleetRates

_NO_ATTENTION: Final = 1e9
"""In place of the length at which attention costs as much as all else, where it cost nothing that could be seen."""
_MIN_TURNS: Final = 3
_NOISE: Final = 1.03


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnSample:
    """A turn on idle engines."""

    prompt_tokens: int
    present_tokens: int
    """That P had, fetched or in its cache."""
    fetched_tokens: int
    handed_tokens: int
    """That D had not, and read from P."""
    control_s: float
    prefill_s: float
    """On P, the fetch among it."""
    fetch_s: float | None
    handover_s: float
    """From P's answer to the first token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeSample:
    """Answers of some sequences at the same time."""

    num_sequences: int
    context_tokens: int
    """Of all of them."""
    step_s: float
    """Between two tokens of one of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BesideSample:
    """A turn whose prompt P computed whole while D decoded one other sequence."""

    turn: TurnSample
    context_tokens: int
    """Of the sequence on D."""
    step_s: float
    """Between two of its tokens while P computed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What is known of the engines without measuring."""

    model: str
    source: str
    kv_bytes_per_token: int
    max_context_tokens: int
    pool_tokens: int
    step_tokens: int
    prefill_step_tokens: int


def fit_rates(
    shape: Shape, turns: Sequence[TurnSample], decodes: Sequence[DecodeSample], besides: Sequence[BesideSample] = ()
) -> FleetRates:
    """Return the rates that explain the samples best; engines are taken to share nothing where nothing stands beside.

    Raises:
        ValueError: there are too few samples of a kind, or none of them tells the rate.
    """
    fetches = [turn for turn in turns if turn.fetch_s is not None and turn.fetched_tokens]
    for name, samples in (("turns", turns), ("fetches", fetches), ("answers", decodes)):
        if len(samples) < _MIN_TURNS:
            msg = (
                f"only {len(samples)} {name} could be measured; {_MIN_TURNS} are the least: look into the engines' logs"
            )
            raise ValueError(msg)
    step_s, sequence_s, context_s = fit_costs(
        [(1.0, one.num_sequences - 1.0, float(one.context_tokens)) for one in decodes], [one.step_s for one in decodes]
    )
    computed_s = [turn.prefill_s - (turn.fetch_s or 0.0) for turn in turns]
    prefill_fixed_s, token_s, square_s = fit_costs([_work(turn) for turn in turns], computed_s)
    if not token_s and not square_s:
        msg = "prefills took the same whatever their length: measure longer ones (--max-tokens)"
        raise ValueError(msg)
    # Of a small model attention may be all that can be seen: then it outweighs the rest from the first token on.
    token_s = max(token_s, square_s)
    fetch_fixed_s, fetch_s = fit_costs(
        [(1.0, float(turn.fetched_tokens)) for turn in fetches], [turn.fetch_s or 0.0 for turn in fetches]
    )
    handover_fixed_s, handover_s = fit_costs(
        [(1.0, float(turn.handed_tokens)) for turn in turns], [turn.handover_s for turn in turns]
    )
    alone = FleetRates(
        **asdict(shape),
        control_s=float(np.median([turn.control_s for turn in turns])),
        prefill_fixed_s=prefill_fixed_s,
        prefill_least_s=0.0,
        prefill_s_per_token=token_s,
        attention_tokens=token_s / square_s if square_s else _NO_ATTENTION,
        fetch_fixed_s=fetch_fixed_s,
        fetch_s_per_token=fetch_s,
        # The first step of the answer is counted by itself.
        handover_fixed_s=max(0.0, handover_fixed_s - step_s),
        handover_s_per_token=handover_s,
        decode_step_s=step_s,
        decode_s_per_sequence=sequence_s,
        decode_s_per_context_token=context_s,
    )
    return replace(alone, **_beside(alone, besides)) if besides else alone


def _beside(alone: FleetRates, besides: Sequence[BesideSample]) -> dict[str, Any]:
    """Return what takes longer beside a sequence on D: both engines' work, and the waits for D's steps."""
    steps_s = [alone.step_s(1, one.context_tokens) for one in besides]
    pairs = list(zip(besides, steps_s, strict=True))
    control = [(one.turn.control_s - alone.control_s) / step_s for one, step_s in pairs]
    handover = [
        (
            one.turn.handover_s
            - alone.handover_fixed_s
            - alone.handover_s_per_token * one.turn.handed_tokens
            - alone.step_s(2, one.context_tokens + one.turn.prompt_tokens)
        )
        / step_s
        for one, step_s in pairs
    ]
    return {
        "prefill_slowdown": _slowdown(
            [one.turn.prefill_s / alone.prefill_s(one.turn.prompt_tokens) for one in besides]
        ),
        "decode_slowdown": _slowdown([one.step_s / step_s for one, step_s in pairs]),
        "control_steps": max(0.0, float(np.median(control))),
        "handover_steps": max(0.0, float(np.median(handover))),
    }


def _slowdown(ratios: Sequence[float]) -> float:
    """Return how many times as long things take beside each other; 1 where that is within what measuring varies by."""
    ratio = float(np.median(ratios))
    return ratio if ratio > _NOISE else 1.0


def _work(turn: TurnSample) -> tuple[float, float, float]:
    """Return what a prefill's fixed, linear and quadratic costs are multiplied by."""
    end, begin = turn.prompt_tokens, turn.present_tokens
    return 1.0, float(end - begin), float(end * end - begin * begin)
