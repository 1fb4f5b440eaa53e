"""What one turn of one arm showed, and the statistics of many. Pure.

`Sample` is made by the arms; `quantile_with_interval` and `ratio_with_interval` are what all reports are made of.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Final

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

CONFIDENCE: Final = 0.95
_RESAMPLES: Final = 2_000
_BATCH: Final = 200  # resamples at a time: 2,000 of 10,000 values at once would take 160 MB


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One turn."""

    arm: str
    round: int
    """Rounds count from 0."""
    session: int
    turn: int
    """Turns count from 1."""
    beside: bool
    """Whether other requests were decoding on the same engines."""
    is_measured: bool = True
    """False where the turn was only there to make the history longer."""
    ttft_s: float
    """Seconds from sending the request to the first piece of text, at the client."""
    gaps_s: tuple[float, ...] = field(repr=False)
    """[pieces - 1], seconds between one piece of text and the next."""
    prompt_tokens: int
    held_tokens: int = 0
    reused_tokens: int = 0
    fetched_tokens: int = 0
    computed_tokens: int = 0
    outcome: str = ""
    """Empty where the server does not say."""
    prefill_s: float | None = None
    fetch_s: float | None = None
    handover_s: float | None = None
    overhead_s: float | None = None
    """Seconds of the turn that the session layer took by itself; None where the server does not say."""
    prompt_ids: tuple[int, ...] = field(default=(), repr=False)
    """[prompt_tokens]"""
    token_ids: tuple[int, ...] = field(default=(), repr=False)
    """[generated tokens]"""

    def to_json(self) -> dict[str, Any]:
        """Return the sample as it stands in the file of all samples; token ids stay out."""
        return {name: value for name, value in asdict(self).items() if name not in {"prompt_ids", "token_ids"}}


@dataclass(frozen=True, slots=True)
class Estimate:
    """A number, and the interval that holds it with `CONFIDENCE`."""

    value: float
    low: float
    high: float

    def to_json(self) -> dict[str, float]:
        """Return the estimate as the file has it."""
        return asdict(self)


def quantile_with_interval(values: Sequence[float], q: float, *, seed: int = 0) -> Estimate | None:
    """Return a quantile with its bootstrap interval; None where there are no values.

    Args:
        values: [n], in any order.
        q: 0.5 for the median.
        seed: of the resampling.
    """
    if not values:
        return None
    own = np.asarray(values, dtype=np.float64)
    drawn = _resampled(own, q, np.random.default_rng(seed))
    return _estimate(float(np.quantile(own, q)), drawn)


def ratio_with_interval(
    values: Sequence[float], others: Sequence[float], q: float = 0.5, *, seed: int = 0
) -> Estimate | None:
    """Return the ratio of two quantiles, `values` over `others`, with its bootstrap interval.

    Returns:
        None where either has no values.
    """
    if not values or not others:
        return None
    own, other = np.asarray(values, dtype=np.float64), np.asarray(others, dtype=np.float64)
    generator = np.random.default_rng(seed)
    drawn = _resampled(own, q, generator) / _resampled(other, q, generator)
    return _estimate(float(np.quantile(own, q) / np.quantile(other, q)), drawn)


def _resampled(values: Any, q: float, generator: np.random.Generator) -> Any:
    """Return the quantile of each of many samples drawn from `values` with replacement: [resamples]."""
    found = []
    for _ in range(0, _RESAMPLES, _BATCH):
        picked = generator.integers(0, values.size, size=(_BATCH, values.size))
        found.append(np.quantile(values[picked], q, axis=1))
    return np.concatenate(found)


def _estimate(value: float, drawn: Any) -> Estimate:
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(drawn, [tail, 1 - tail])
    return Estimate(value, float(low), float(high))
