"""What a soak found, and whether that is good enough. Pure."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

MAX_SLOPE_MB_PER_MIN: Final = 1.0
YOUNG_S: Final = 60.0
"""A young engine grows, for it touches its memory for the first time."""
_WATCHED: Final = {"prefill", "decode"}
# Fewer tell nothing of a slope.
_MIN_SAMPLES: Final = 10


@dataclass(frozen=True)
class Sample:
    """What one engine's processes took at one moment; `pid` tells its incarnations apart."""

    engine: str
    pid: int
    at_s: float
    rss_bytes: int


def slope_mb_per_min(points: Sequence[tuple[float, float]]) -> float:
    """Return by how much bytes grow, in MB (10**6) a minute, as the straight line of least squares does.

    Args:
        points: seconds and bytes; of fewer than two the slope is 0.
    """
    if len(points) < 2:
        return 0.0
    mean_s = sum(at_s for at_s, _ in points) / len(points)
    mean = sum(value for _, value in points) / len(points)
    spread = sum((at_s - mean_s) ** 2 for at_s, _ in points)
    if not spread:
        return 0.0
    return sum((at_s - mean_s) * (value - mean) for at_s, value in points) / spread * 60 / 1e6


def slopes(samples: Iterable[Sample], from_s: float, ready_s: Mapping[int, float]) -> dict[str, float]:
    """Return each engine's slope from a moment on; of several incarnations the steepest one's.

    An engine of which there are too few samples is left out: nothing is known of it.

    Args:
        samples: of all engines.
        from_s: the moment.
        ready_s: by process id, when an engine was ready; it counts a minute later at the earliest.
    """
    lives: defaultdict[tuple[str, int], list[tuple[float, float]]] = defaultdict(list)
    for sample in samples:
        if sample.pid in ready_s and sample.at_s >= max(from_s, ready_s[sample.pid] + YOUNG_S):
            lives[sample.engine, sample.pid].append((sample.at_s, float(sample.rss_bytes)))
    found: dict[str, float] = {}
    for (engine, _), points in lives.items():
        if len(points) >= _MIN_SAMPLES:
            found[engine] = max(found.get(engine, float("-inf")), slope_mb_per_min(points))
    return found


def curves(samples: Iterable[Sample], every_s: float = 30.0) -> dict[str, list[list[float]]]:
    """Return each engine's memory over time, one sample each so many seconds, as pairs of seconds and MB."""
    found: defaultdict[str, dict[int, list[float]]] = defaultdict(dict)
    for sample in samples:
        point = [round(sample.at_s, 1), round(sample.rss_bytes / 1e6, 1)]
        found[sample.engine].setdefault(int(sample.at_s / every_s), point)
    return {engine: list(points.values()) for engine, points in found.items()}


@dataclass
class SoakResult:
    """All that goes into `out/soak.json`."""

    settings: Mapping[str, Any]
    versions: Mapping[str, str]
    turns: int
    wrong_answers: int
    near_ties: int
    unfinished_answers: int
    prompts_with_bad_characters: int
    faults_by_kind: Mapping[str, int]
    errors: Mapping[str, int]
    outcomes: Mapping[str, int]
    reasons: Mapping[str, int]
    tokens: Mapping[str, int]
    stale_reads: int
    blocks_leaked: int
    rss_slope_mb_per_min_by_engine: Mapping[str, float]
    rss_mb: Mapping[str, list[list[float]]]
    reference_rss_slope_mb_per_min: float | None
    engines_alive: bool
    wrong: list[dict[str, Any]] = field(default_factory=list)

    @property
    def faults(self) -> int:
        """Return how many there were, of all kinds."""
        return sum(self.faults_by_kind.values())

    @property
    def rss_slope_mb_per_min(self) -> float | None:
        """Return the slope of the engine that grows most; None where one of the two was not watched for long enough."""
        found = self.rss_slope_mb_per_min_by_engine
        return max(found.values()) if set(found) == _WATCHED else None

    def to_json(self) -> dict[str, Any]:
        """Return the file's content."""
        numbers = {"faults": self.faults, "rss_slope_mb_per_min": self.rss_slope_mb_per_min}
        return {**vars(self), **numbers, "passed": not self.missed()}

    def missed(self) -> list[str]:
        """Return the bars that were missed, as sentences."""
        rules = (
            (self.turns > 0, "no turn was answered"),
            (not self.wrong_answers, f"{self.wrong_answers} wrong answers"),
            (not self.blocks_leaked, f"{self.blocks_leaked} leaked blocks"),
            (not self.stale_reads, f"{self.stale_reads} stale reads"),
            (self.engines_alive, "an engine is dead"),
            (self.rss_slope_mb_per_min is not None, "memory was not watched for long enough"),
            *(
                (slope < MAX_SLOPE_MB_PER_MIN, f"the memory of {engine} grows by {slope:.2f} MB/min")
                for engine, slope in self.rss_slope_mb_per_min_by_engine.items()
            ),
        )
        return [what for holds, what in rules if not holds]

    def table(self) -> str:
        """Return a short summary."""
        slope = ", ".join(f"{engine} {value:+.2f}" for engine, value in self.rss_slope_mb_per_min_by_engine.items())
        stock = self.reference_rss_slope_mb_per_min
        lines = {
            "turns answered": f"{self.turns} ({_counts(self.outcomes)})",
            "reasons": _counts(self.reasons),
            "without P": _share(self.reasons.get("prefill_unavailable", 0), self.turns),
            "wrong answers": f"{self.wrong_answers} (and {self.near_ties} ties of two tokens)",
            "compared as well": f"{self.unfinished_answers} streams that were left or broke, as far as they came",
            "bad characters": f"in {self.prompts_with_bad_characters} prompts, compared but for these",
            "faults": f"{self.faults} ({_counts(self.faults_by_kind)})",
            "calls that failed": f"{sum(self.errors.values())} ({_counts(self.errors)})",
            "tokens of prompts": _counts(self.tokens),
            "blocks leaked": str(self.blocks_leaked),
            "memory, MB/min": slope + ("" if stock is None else f" (plain vLLM beside them {stock:+.2f})"),
            "engines alive": "yes" if self.engines_alive else "NO",
        }
        return "\n".join(f"{name:<18} {value}" for name, value in lines.items())


def _counts(numbers: Mapping[str, int]) -> str:
    return (
        ", ".join(f"{name} {number}" for name, number in sorted(numbers.items(), key=lambda item: -item[1])) or "none"
    )


def _share(number: int, total: int) -> str:
    return f"{number} turns ({number / total:.0%}), P did not answer" if total else "none"
