"""Makes up sessions by seed, with the distributions of recorded coding agents.

`AGENT` has the quantiles of 48,000 requests of 710 published Claude Code traces (kv-cache-tester): medians and 90th
percentiles as log-normals. `SMALL` is the same for models with 8k of context: tokens are divided by about 25, and
gaps by one factor, by which leases must be divided too (`Workload.scaled_s`); shares and order stay.
"""

import math
from collections.abc import Container, Iterator
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import Final

import numpy as np
import numpy.typing as npt

from .plan import PlannedSession, PlannedTurn

_ARRIVALS: Final = 1 << 32  # the random stream of the start times; those of the sessions are counted from 0
_MIN_DELTA_SHARE: Final = 0.02  # of the median growth: an answer may be longer than what the prompt grows by
_COMPACTED: Final = (0.05, 0.5)
_EDITED_LATE: Final = (0.8, 1.0)
_EDITED_EARLY: Final = (0.0, 0.8)
_MAX_CONTEXT_SHARE: Final = 0.9
"""A session begins with no more than this of the context: one turn at least must fit behind."""


@dataclass(frozen=True, slots=True)
class LogNormal:
    """A log-normal distribution by its median and the spread of its logarithm."""

    median: float
    sigma: float

    def divided(self, divisor: float) -> "LogNormal":
        """Return the distribution of values divided by `divisor`."""
        return LogNormal(self.median / divisor, self.sigma)


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What sessions are like; sizes in tokens, times in seconds.

    Raises:
        ValueError: a value makes no sense; the text names it.
    """

    num_turns: LogNormal = LogNormal(45, 0.97)
    max_turns: int = 500
    system_tokens: int = 14_900
    """System prompt and tools: what stays through a compaction."""
    first: LogNormal = LogNormal(24_500, 1.84)
    """Tokens of the first prompt; never less than those of the system prompt, drawn so that it fits the context."""
    growth: LogNormal = LogNormal(646, 1.32)
    """Tokens that a prompt has more than the one before it: the last answer and the delta."""
    output: LogNormal = LogNormal(216, 1.11)
    gap_after_tool: LogNormal = LogNormal(9, 1.61)
    gap_after_stop: LogNormal = LogNormal(128, 2.10)
    tool_share: float = 0.861
    """Of the gaps, those that a tool call begins."""
    compaction_share: float = 0.006
    """Of the later turns: all behind the system prompt is replaced by a summary."""
    early_edit_share: float = 0.004
    """A change anywhere in the first 80 % of the history."""
    late_edit_share: float = 0.018
    """A change in the last 20 %, such as reasoning that is left out."""
    max_context_tokens: int = 131_072
    """Of a prompt and its answer; a session that comes to it is compacted."""
    time_divisor: float = 1.0
    """What gaps were divided by (see `scaled_s`)."""

    def __post_init__(self) -> None:
        shares = self.compaction_share + self.early_edit_share + self.late_edit_share
        for name, value, is_good in (
            ("time_divisor", self.time_divisor, self.time_divisor > 0),
            ("num_turns", self.num_turns.median, self.num_turns.median > 0),
            ("max_turns", self.max_turns, self.max_turns >= 1),
            ("tool_share", self.tool_share, 0 <= self.tool_share <= 1),
            ("the shares of turns that do not append", shares, 0 <= shares <= 1),
            ("max_context_tokens", self.max_context_tokens, self.max_context_tokens >= 2 * self.system_tokens),
        ):
            if not is_good:
                msg = f"workload: {name} is {value!r}; shares lie in 0 to 1, the context is twice the system prompt"
                raise ValueError(msg)

    def scaled_s(self, seconds: float) -> float:
        """Return a time, such as a lease's life, divided as the gaps are."""
        return seconds / self.time_divisor

    def faster(self, divisor: float) -> "Workload":
        """Return the workload with its gaps divided once more."""
        return replace(
            self,
            gap_after_tool=self.gap_after_tool.divided(divisor),
            gap_after_stop=self.gap_after_stop.divided(divisor),
            time_divisor=self.time_divisor * divisor,
        )

    def fitting(self, max_context_tokens: int) -> "Workload":
        """Return the workload for a model with this context; sessions stay below it.

        Raises:
            ValueError: it is shorter than two system prompts.
        """
        return replace(self, max_context_tokens=max_context_tokens)


AGENT: Final = Workload()
"""Recorded coding agents."""

SMALL: Final = Workload(
    num_turns=LogNormal(18, 0.5),
    max_turns=40,
    system_tokens=512,
    first=LogNormal(1_000, 0.5),
    growth=LogNormal(40, 1.3),
    output=LogNormal(32, 0.8),
    max_context_tokens=7_500,
).faster(20)
"""The same for a model with 8k of context on CPUs: tokens by about 25, gaps by 20."""


def generate(
    workload: Workload,
    num_sessions: int,
    *,
    seed: int,
    rate_per_s: float | None,
    wanted: Container[int] | None = None,
) -> Iterator[PlannedSession]:
    """Yield sessions in the order of their start; the n-th is the same whatever `num_sessions` and the rate are.

    Args:
        workload: what they are like.
        num_sessions: how many.
        seed: 0 or more; all is drawn from it.
        rate_per_s: sessions that begin per second, at random (Poisson); None: all begin at 0.
        wanted: the numbers, from 0, of those that are yielded; None: all. The others are not even drawn.

    Raises:
        ValueError: a number is negative.
    """
    if num_sessions < 0 or seed < 0 or (rate_per_s is not None and not rate_per_s > 0):
        msg = f"{num_sessions} sessions, seed {seed}, {rate_per_s} a second: give 0 or more, and a rate above 0"
        raise ValueError(msg)
    arrivals = np.random.default_rng((seed, _ARRIVALS))
    start_s = 0.0
    for index in range(num_sessions):
        if rate_per_s is not None:
            start_s += float(arrivals.exponential(1 / rate_per_s))
        if wanted is None or index in wanted:
            yield PlannedSession(start_s, _turns(workload, np.random.default_rng((seed, index))))


def _turns(workload: Workload, random: np.random.Generator) -> tuple[PlannedTurn, ...]:
    num_turns = min(max(1, round(float(_draw(workload.num_turns, random, 1)[0]))), workload.max_turns)
    first = _first_tokens(workload, random.random())
    growths, drawn_outputs = _draw(workload.growth, random, num_turns), _draw(workload.output, random, num_turns)
    after_tool = random.random(num_turns) < workload.tool_share
    tool_gaps, stop_gaps = (_draw(gap, random, num_turns) for gap in (workload.gap_after_tool, workload.gap_after_stop))
    events, places = random.random(num_turns), random.random(num_turns)
    most, max_output = workload.max_context_tokens, max(1, workload.max_context_tokens // 10)
    min_delta = max(1, round(workload.growth.median * _MIN_DELTA_SHARE))
    outputs = np.clip(np.rint(drawn_outputs), 1, max_output).astype(np.int64)
    deltas = np.maximum(min_delta, np.rint(growths[1:]).astype(np.int64) - outputs[:-1])
    planned = zip(
        np.where(after_tool, tool_gaps, stop_gaps)[1:].tolist(),
        after_tool[1:].tolist(),
        deltas.tolist(),
        outputs[1:].tolist(),
        events[1:].tolist(),
        places[1:].tolist(),
        strict=True,
    )
    history = first + int(outputs[0])
    turns = [PlannedTurn(0.0, after_tool=False, delta_tokens=first, output_tokens=int(outputs[0]))]
    for gap_s, is_after_tool, delta, output, event, place in planned:
        kept = _kept(workload, history, event, place)
        if (history if kept is None else kept) + delta + output > most:
            kept = min(workload.system_tokens, history)
            delta = min(delta, most - kept - output)  # noqa: PLW2901 (what was drawn does not fit)
        elif kept is not None and event < workload.compaction_share:
            delta += round((history - kept) * _between(_COMPACTED, place))  # noqa: PLW2901 (a summary)
            delta = max(1, min(delta, most - kept - output))  # noqa: PLW2901
        turns.append(PlannedTurn(gap_s, is_after_tool, delta, output, kept))
        history = (history if kept is None else kept) + delta + output
    return tuple(turns)


def _kept(workload: Workload, history: int, event: float, place: float) -> int | None:
    """Return what stays of a history of so many tokens; None where the turn only appends."""
    if event < workload.compaction_share:
        return min(workload.system_tokens, history)
    event -= workload.compaction_share
    if event < workload.early_edit_share:
        return int(history * _between(_EDITED_EARLY, place))
    if event < workload.early_edit_share + workload.late_edit_share:
        return int(history * _between(_EDITED_LATE, place))
    return None


def _first_tokens(workload: Workload, chance: float) -> int:
    """Return the tokens of a first prompt, from the part of the distribution that fits the context."""
    first, most = workload.first, workload.max_context_tokens * _MAX_CONTEXT_SHARE
    normal = NormalDist(math.log(first.median), first.sigma)
    # Above 0, for the quantile of 0 is not a number of tokens.
    drawn = math.exp(normal.inv_cdf(max(chance, 1e-12) * normal.cdf(math.log(most))))
    return max(workload.system_tokens, round(drawn))


def _draw(distribution: LogNormal, random: np.random.Generator, num: int) -> npt.NDArray[np.float64]:
    return np.exp(random.normal(math.log(distribution.median), distribution.sigma, num))


def _between(ends: tuple[float, float], place: float) -> float:
    return ends[0] + (ends[1] - ends[0]) * place
