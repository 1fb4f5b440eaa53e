"""What the demo found, and whether that is good enough. Pure.

`Result` is made once both arms have run; `checks` judges it, `to_json` is the file. May import `_turns` and the limits.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from statistics import median
from typing import TYPE_CHECKING, Any, Final

from server_ext.benchmark.limits import PrefillRate, ceiling

if TYPE_CHECKING:
    from collections.abc import Mapping

    from bench._turns import MeasuredTurn

LONG_TOKENS: Final = 2000
"""A turn counts in the ratio when the session held at least this much before it."""

# A partly filled block may not be fetched: on histories of 1,200 tokens and more that is less than 5 %.
_MIN_FETCHED_SHARE: Final = 0.95
_MIN_RATIO: Final = 8.0
_MIN_SHARE_OF_CEILING: Final = 0.7
_MAX_OVERHEAD_S: Final = 0.030
_MAX_IDLE_CORES: Final = 0.10


@dataclass(frozen=True, slots=True)
class Check:
    """One expectation, and what was found."""

    name: str
    passed: bool
    found: str


@dataclass(frozen=True)
class Result:
    """Both arms: the same turns with the history fetched, and with everything computed again."""

    turns: list[MeasuredTurn]
    turns_without_reuse: list[MeasuredTurn]
    idle_cpu_cores: float
    """CPU seconds per second of both engines together, while they held a lease and had nothing to do."""
    idle_lease_state: str
    """State of the lease after that time."""
    versions: Mapping[str, str]
    attention_tokens: float
    """Length at which the model's attention costs as much as its weights (see `server_ext.benchmark.limits`)."""
    short_prefills: list[tuple[int, float]]
    """Tokens and seconds of prompts of a few tokens, all computed: what a prefill costs at least."""

    @cached_property
    def speedups(self) -> list[float]:
        """Time to first token without reuse, divided by that with it, turn by turn."""
        return [without.ttft_s / turn.ttft_s for turn, without in self._pairs()]

    @cached_property
    def ratio(self) -> float:
        """Median TTFT without reuse over median TTFT with it, of the long turns; 0 where there is none."""
        long = [(turn, without) for turn, without in self._pairs() if turn.cache.held_tokens >= LONG_TOKENS]
        if not long:
            return 0.0
        return median(without.ttft_s for _, without in long) / median(turn.ttft_s for turn, _ in long)

    @cached_property
    def prefill_rate(self) -> PrefillRate:
        """Rate of P, from the arm without reuse and the short prompts."""
        long = [
            (turn.cache.prompt_tokens, turn.cache.timings_s.prefill)
            for turn in self.turns_without_reuse
            if turn.cache.timings_s.prefill is not None
        ]
        return PrefillRate.fit([*self.short_prefills, *long], self.attention_tokens)

    @cached_property
    def ceiling_ratio(self) -> float:
        """Median over the long turns of what is possible at most; 0 where there is none."""
        long = [
            ceiling(
                self.prefill_rate,
                held_tokens=turn.cache.held_tokens,
                prompt_tokens=turn.cache.prompt_tokens,
                fetch_s=turn.cache.timings_s.fetch or 0.0,  # unknown: free, so the ceiling is never too low
            )
            for turn in self.turns
            if turn.cache.held_tokens >= LONG_TOKENS
        ]
        return median(long) if long else 0.0

    @cached_property
    def differing_turns(self) -> list[int]:
        """Numbers of the turns whose tokens are not the same in both arms."""
        return [turn.turn for turn, without in self._pairs() if not turn.same_tokens(without)]

    @cached_property
    def session_overhead_p50_s(self) -> float:
        """Median of what the session layer adds to a turn: rendering, begin and settle."""
        timings = [turn.cache.timings_s for turn in self.turns]
        return median((t.render or 0.0) + (t.begin or 0.0) + (t.settle or 0.0) for t in timings)

    def to_json(self) -> dict[str, Any]:
        """Return the content of `out/demo.json`; times are in seconds."""
        rate = self.prefill_rate
        return {
            "turns": [turn.to_json() for turn in self.turns],
            "turns_without_reuse": [turn.to_json() for turn in self.turns_without_reuse],
            "ratio": self.ratio,
            "ceiling_ratio": self.ceiling_ratio,
            "prefill_rate": {
                "fixed_s": rate.fixed_s,
                "token_s": rate.token_s,
                "attention_tokens": rate.attention_tokens,
            },
            "tokens_identical": not self.differing_turns,
            "session_overhead_p50_s": self.session_overhead_p50_s,
            "idle_cpu_cores": self.idle_cpu_cores,
            "versions": dict(self.versions),
        }

    def checks(self) -> list[Check]:
        """Judge the result."""
        return [*self._reuse_checks(), *self._speed_checks()]

    def _reuse_checks(self) -> list[Check]:
        later = [turn.cache for turn in self.turns[1:]]
        others = [
            f"turn {turn.turn}: {turn.cache.outcome}" for turn in self.turns[1:] if turn.cache.outcome != "fetched"
        ]
        share = min((cache.fetched_tokens / max(cache.held_tokens, 1) for cache in later), default=0.0)
        reused = sum(turn.cache.fetched_tokens + turn.cache.reused_tokens for turn in self.turns_without_reuse)
        differing = self.differing_turns
        return [
            Check(
                "every turn but the first fetched its history",
                bool(later) and not others,
                ", ".join(others) or f"{len(later)} turns",
            ),
            Check("at least 95% of what was held was fetched", share >= _MIN_FETCHED_SHARE, f"{share:.1%}"),
            Check("the arm without reuse reused nothing", reused == 0, f"{reused} tokens"),
            Check(
                "both arms generated the same tokens",
                not differing,
                f"turns {differing} differ" if differing else f"{len(self.turns)} turns compared",
            ),
        ]

    def _speed_checks(self) -> list[Check]:
        needed = _MIN_SHARE_OF_CEILING * self.ceiling_ratio
        overhead_s, cores = self.session_overhead_p50_s, self.idle_cpu_cores
        held = self.idle_lease_state == "active"
        return [
            Check(
                f"first token at least {_MIN_RATIO:.0f} times sooner",
                self.ratio >= _MIN_RATIO,
                f"{self.ratio:.1f} times",
            ),
            Check(
                f"at least {_MIN_SHARE_OF_CEILING:.0%} of the physical limit",
                self.ratio >= needed > 0,
                f"{self.ratio:.1f} of {self.ceiling_ratio:.1f} times",
            ),
            Check(
                f"the session layer adds at most {_MAX_OVERHEAD_S * 1000:.0f} ms to a turn (p50)",
                overhead_s <= _MAX_OVERHEAD_S,
                f"{overhead_s * 1000:.1f} ms",
            ),
            Check(
                f"idle engines that hold a lease use at most {_MAX_IDLE_CORES:.2f} cores",
                held and cores <= _MAX_IDLE_CORES,
                f"{cores:.3f} cores, lease {self.idle_lease_state}",
            ),
        ]

    def _pairs(self) -> zip[tuple[MeasuredTurn, MeasuredTurn]]:
        return zip(self.turns, self.turns_without_reuse, strict=True)
