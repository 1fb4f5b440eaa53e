"""What a scenario showed, arm by arm. Pure.

`ScenarioResult` gathers parts as they come; `figures` are an arm's numbers, `to_json` the scenario's part of the file.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import median, quantiles
from typing import TYPE_CHECKING, Any, Final

from server_ext.benchmark.samples import Estimate, quantile_with_interval, ratio_with_interval

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from server_ext.benchmark.limits import MeasuredRates
    from server_ext.benchmark.rounds import ArmRound, Reference
    from server_ext.benchmark.samples import Sample
    from server_ext.benchmark.scenarios import Scenario

QUANTILES: Final[Mapping[str, float]] = {"p50": 0.5, "p95": 0.95, "p99": 0.99}
_MIN_FOR: Final[Mapping[str, int]] = {"p50": 1, "p95": 20, "p99": 100}
"""Values that a quantile needs, so that it is not just the largest one."""


@dataclass
class ArmResult:
    """One arm's turns over all rounds."""

    name: str
    parts: list[ArmRound] = field(default_factory=list)
    num_wrong: int = 0
    """Turns whose tokens are not those of the reference arm."""

    @property
    def samples(self) -> list[Sample]:
        """All turns, in the order of the rounds."""
        return [sample for part in self.parts for sample in part.samples]

    def later(self, *, beside: bool | None = None) -> list[Sample]:
        """Return the measured turns from the second on; with `beside`, those with, or without, other requests."""
        return [one for one in self.samples if one.turn > 1 and one.is_measured and beside in (None, one.beside)]

    def total(self, counter: str) -> float | None:
        """Return what the engines counted during this arm's rounds; None where they do not count it."""
        found = [part.counters[counter] for part in self.parts if counter in part.counters]
        return sum(found) if found else None


@dataclass
class ScenarioResult:
    """One scenario; the first arm is the reference."""

    scenario: Scenario
    reference: Reference
    arms: dict[str, ArmResult] = field(default_factory=dict)
    rates: MeasuredRates | None = None
    """Of the same run; None where nothing was fetched."""
    model: str = ""
    """Served name."""
    first_s: dict[str, tuple[float, ...]] = field(default_factory=dict)
    """By arm, one for each set of engines: time to the first token of the turns that came before all others."""
    seconds: float = 0.0
    """That the scenario took, warm-up included."""
    ended_early: str | None = None
    """What ended it before its last round; None where nothing did."""

    def add(self, part: ArmRound) -> None:
        """Take one arm's part of one round."""
        arm = self.arms.setdefault(part.arm, ArmResult(part.arm))
        arm.parts.append(part)
        arm.num_wrong += sum(self.reference.differs(sample) for sample in part.samples)

    @property
    def base(self) -> ArmResult:
        """The reference arm."""
        return next(iter(self.arms.values()))

    @property
    def samples(self) -> list[Sample]:
        """All turns of all arms."""
        return [sample for arm in self.arms.values() for sample in arm.samples]

    def figures(self, arm: ArmResult) -> dict[str, Any]:
        """Return an arm's numbers: times in seconds; an interval holds its number with 95 % confidence."""
        alone, later = arm.later(beside=False), arm.later()
        seconds = sum(part.seconds for part in arm.parts)
        # All turns: bytes stay pinned between those that are not measured as well.
        avoided = sum(one.reused_tokens + one.fetched_tokens for one in arm.samples if one.turn > 1)
        pinned = arm.total("pinned_byte_s")
        return {
            "rounds": len(arm.parts),
            "turns": len(arm.samples),
            "turns_measured": len(alone),
            "tokens_wrong": arm.num_wrong,
            "errors": [error for part in arm.parts for error in part.errors],
            "outcomes": _shares(one.outcome for one in later if one.outcome),
            "ttft_first_turn_s": _quantiles([one.ttft_s for one in arm.samples if one.turn == 1]),
            "ttft_s": _quantiles([one.ttft_s for one in alone]),
            "ttft_beside_s": _quantiles([one.ttft_s for one in arm.later(beside=True)]),
            "itl_s": _quantiles([gap for one in later if not one.beside for gap in one.gaps_s]),
            "itl_beside_s": _quantiles([gap for part in arm.parts for gap in part.beside_gaps_s]),
            "speedup": _json(self._speedup(arm, lambda one: not one.beside)),
            "points": {str(point): self._at_point(arm, point) for point in self.scenario.points},
            "turns_per_s": len(arm.samples) / seconds if seconds else None,
            "bytes_moved": arm.total("bytes_moved"),
            "num_preemptions": arm.total("num_preemptions"),
            "pinned_byte_s_per_avoided_token": pinned / avoided if avoided and pinned is not None else None,
            "session_overhead_p50_s": _overhead(alone),
            "session_overhead_beside_p50_s": _overhead(arm.later(beside=True)),
            "floor_ratio_p50": _floor_ratio(alone, self.rates),
        }

    def to_json(self) -> dict[str, Any]:
        """Return the scenario's part of the file."""
        return {
            "what": self.scenario.what,
            "model": self.model,
            "seconds": round(self.seconds, 1),
            "ended_early": self.ended_early,
            "warm_up_ttft_s": {name: list(times) for name, times in self.first_s.items()},
            "rates": None if self.rates is None else self.rates.to_json(),
            "arms": {name: self.figures(arm) for name, arm in self.arms.items()},
        }

    def _speedup(self, arm: ArmResult, belongs: Callable[[Sample], bool], q: float = 0.5) -> Estimate | None:
        times, base = ([one.ttft_s for one in which.later() if belongs(one)] for which in (arm, self.base))
        return ratio_with_interval(base, times, q)

    def _at_point(self, arm: ArmResult, point: int) -> dict[str, Any]:
        """Return the numbers of the later turns whose prompt is nearest to one history point."""

        def belongs(one: Sample) -> bool:
            return not one.beside and min(self.scenario.points, key=lambda p: abs(one.prompt_tokens - p)) == point

        rates = self.rates
        own = [one for one in arm.later() if belongs(one)]
        ceilings = [rates.ceiling(one) for one in own if one.fetched_tokens] if rates else []
        return {
            "turns": len(own),
            "prompt_tokens_p50": median(one.prompt_tokens for one in own) if own else None,
            "ttft_s": _quantiles([one.ttft_s for one in own]),
            "speedup": _json(self._speedup(arm, belongs)),
            "speedup_p99": _json(self._speedup(arm, belongs, 0.99)) if len(own) >= _MIN_FOR["p99"] else None,
            "ceiling_p50": median(ceilings) if ceilings else None,
            "ceiling_p99": _p99(ceilings),
            "floor_ratio_p50": _floor_ratio(own, rates),
        }


def _quantiles(values: list[float]) -> dict[str, Any]:
    """Return `{"p50": {value, low, high}, …, "count": n}`; a quantile that `values` cannot show is left out."""
    found: dict[str, Any] = {"count": len(values)}
    for name, q in QUANTILES.items():
        if len(values) >= _MIN_FOR[name]:
            found[name] = _json(quantile_with_interval(values, q))
    return found


def _p99(values: list[float]) -> float | None:
    return quantiles(values, n=100, method="inclusive")[-1] if len(values) >= _MIN_FOR["p99"] else None


def _floor_ratio(samples: list[Sample], rates: MeasuredRates | None) -> float | None:
    known = [one for one in samples if one.outcome]  # a stock server does not say what it moved
    if rates is None or not known:
        return None
    return median(one.ttft_s / rates.floor_s(one) for one in known)


def _overhead(samples: list[Sample]) -> float | None:
    """Return the median of what the session layer took; None where the server does not say."""
    found = [one.overhead_s for one in samples if one.overhead_s is not None]
    return median(found) if found else None


def _shares(words: Iterable[str]) -> dict[str, float]:
    words = list(words)
    return {word: words.count(word) / len(words) for word in sorted(set(words))}


def _json(estimate: Estimate | None) -> dict[str, float] | None:
    return None if estimate is None else estimate.to_json()
