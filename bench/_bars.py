"""What the benchmark must show, judged on its file's content. Pure."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final

from bench._result import Check

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

OUR_ARMS: Final = ("no_reuse", "prefill_cache", "local", "fetch", "auto")
_MIN_RATIO: Final = {"2000": 8.0, "3000": 15.0, "6000": 25.0}
"""Of `fetch` against `no_reuse`, by length of the history; on two cores with SmolLM2, see docs/bench.md."""
_MIN_TURNS_P95: Final = 100
"""With fewer turns a 95th percentile is the luck of a few; the scenarios with a tiny model have more."""
_MIN_SHARE_OF_CEILING: Final = 0.7
_MAX_FLOOR_RATIO: Final = 1.5
_MAX_BEHIND_BEST: Final = 1.05
_MIN_AGAINST_NO_REUSE: Final = 0.97
_MAX_HARM: Final = 1.05
_MAX_OVERHEAD_S: Final = 0.015


def checks(result: Mapping[str, Any]) -> list[Check]:
    """Judge `bench.json`."""
    found: list[Check] = []
    for name, scenario in result["scenarios"].items():
        arms = scenario["arms"]
        wrong = sum(arms[arm]["tokens_wrong"] for arm in OUR_ARMS if arm in arms)
        found.append(Check(f"{name}: no wrong token in our arms", wrong == 0, f"{wrong} turns"))
        found += _auto(name, arms)
        if "fetch" in arms:
            found += _fetch(name, arms)
    return found


def _auto(name: str, arms: Mapping[str, Any]) -> Iterator[Check]:
    """`auto` is the best of our ways, or within 5 % of it, and never worse than computing everything."""
    if "auto" not in arms:
        return
    for quantile in ("p50", "p95"):
        found = {arm: one["ttft_s"][quantile] for arm, one in arms.items() if one["ttft_s"].get(quantile)}
        auto = found.pop("auto", None)
        if auto is None or (quantile == "p95" and arms["auto"]["ttft_s"]["count"] < _MIN_TURNS_P95):
            continue
        best_s, best = min(
            [(one["value"], arm) for arm, one in found.items() if arm in OUR_ARMS] or [(math.inf, "none")]
        )
        beside = [f"{arm} {one['value']:.3f} s" for arm, one in found.items() if arm not in OUR_ARMS]
        yield Check(
            f"{name}: auto within 5% of the best of our ways, TTFT {quantile}",
            auto["value"] <= _MAX_BEHIND_BEST * best_s,
            f"{auto['value']:.3f} s ({auto['low']:.3f} to {auto['high']:.3f}), {best} {best_s:.3f} s"
            + (f"; beside it {', '.join(beside)}" if beside else ""),
        )
    speedup = arms["auto"]["speedup"]
    # By the better end of the interval: what noise alone can do is no failure.
    if speedup is not None:
        yield Check(
            f"{name}: auto not worse than no_reuse by more than 3%",
            speedup["high"] >= _MIN_AGAINST_NO_REUSE,
            f"{speedup['value']:.2f}x ({speedup['low']:.2f} to {speedup['high']:.2f})",
        )


def _fetch(name: str, arms: Mapping[str, Any]) -> Iterator[Check]:
    fetch, base = arms["fetch"], arms["no_reuse"]
    for point, figures in fetch["points"].items():
        speedup, limit, floor = figures["speedup"], figures["ceiling_p50"], figures["floor_ratio_p50"]
        if speedup is None or limit is None:
            continue
        least = _MIN_RATIO[point]
        yield Check(
            f"{name}: fetch at least {least:.0f}x at {point} tokens", speedup["value"] >= least, _times(speedup)
        )
        for which, one in (("p50", speedup), ("p99", figures["speedup_p99"])):
            if one is not None:
                yield Check(
                    f"{name}: fetch at least 70% of the limit at {point} tokens, {which}",
                    one["value"] >= _MIN_SHARE_OF_CEILING * limit,
                    f"{one['value']:.1f} of {limit:.1f}x",
                )
        yield Check(
            f"{name}: fetch at most 1.5 times its floor at {point} tokens", floor <= _MAX_FLOOR_RATIO, f"{floor:.2f}"
        )
    ours, theirs = (arm["itl_beside_s"].get("p95") for arm in (fetch, base))
    if ours and theirs:
        ratio = ours["value"] / theirs["value"]
        yield Check(
            f"{name}: others' inter-token p95 in fetch within 5% of no_reuse",
            ratio <= _MAX_HARM,
            f"{ratio:.2f}x: {ours['value'] * 1e3:.1f} ms, {theirs['value'] * 1e3:.1f} ms",
        )
    overhead = fetch["session_overhead_p50_s"]
    if overhead is not None:
        yield Check(
            f"{name}: the session layer adds at most 15 ms (p50)",
            overhead <= _MAX_OVERHEAD_S,
            f"{overhead * 1e3:.1f} ms on an idle D" + _beside(fetch["session_overhead_beside_p50_s"]),
        )


def _beside(overhead_s: float | None) -> str:
    return "" if overhead_s is None else f", {overhead_s * 1e3:.1f} ms beside other streams"


def _times(speedup: Mapping[str, float]) -> str:
    return f"{speedup['value']:.1f}x ({speedup['low']:.1f} to {speedup['high']:.1f})"
