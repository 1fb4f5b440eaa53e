"""What the benchmark must show, judged on its file's content. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from bench._result import Check

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

OUR_ARMS: Final = ("no_reuse", "prefill_cache", "local", "fetch", "auto")
_MIN_RATIO: Final = {"2000": 8.0, "3000": 15.0, "6000": 25.0}
"""Of `fetch` against `no_reuse`, by length of the history, with SmolLM2 on two cores."""
_MIN_TURNS_P95: Final = 100
"""With fewer turns a 95th percentile is the luck of a few; the scenarios with a tiny model have more."""
_MIN_SHARE_OF_CEILING: Final = 0.7
_MAX_FLOOR_RATIO: Final = 1.5
_MAX_BEHIND_BEST: Final = 1.05
_MIN_AGAINST_NO_REUSE: Final = 0.97
_MAX_HARM: Final = 1.05
_MAX_OVERHEAD_S: Final = 0.015
_NOT_MEASURED: Final = "not measured"


def checks(result: Mapping[str, Any], wanted: Iterable[str] = ()) -> list[Check]:
    """Judge `bench.json`. A figure that a bar needs and that is not there is a miss.

    Args:
        result: the content of the file.
        wanted: names of the scenarios that it should have.
    """
    found: list[Check] = []
    for name, scenario in result["scenarios"].items():
        arms = scenario["arms"]
        found += _soundness(name, scenario)
        if "auto" in arms:
            found += _auto(name, arms)
        if "fetch" in arms:
            found += _fetch(name, arms)
    missing = [name for name in wanted if name not in result["scenarios"]]
    return [*found, *(Check(f"{name}: measured", passed=False, found="no") for name in missing)]


def _soundness(name: str, scenario: Mapping[str, Any]) -> Iterator[Check]:
    """Our tokens are right, nothing failed, and what is called a fetch is one."""
    arms = scenario["arms"]
    wrong = sum(arms[arm]["tokens_wrong"] for arm in OUR_ARMS if arm in arms)
    yield Check(f"{name}: no wrong token in our arms", wrong == 0, f"{wrong} turns")
    errors = [f"{arm}: {error}" for arm, figures in arms.items() for error in figures["errors"]]
    if scenario["ended_early"] is not None:
        errors.append(scenario["ended_early"])
    yield Check(f"{name}: nothing failed", not errors, "; ".join(errors) or "nothing")
    if "fetch" in arms:
        share = arms["fetch"]["outcomes"].get("fetched", 0.0)
        yield Check(f"{name}: every later turn of fetch fetched", share == 1, f"{share:.1%}")


def _auto(name: str, arms: Mapping[str, Any]) -> Iterator[Check]:
    """`auto` is the first or within 5 % of it, among our ways and among all, and never worse than computing it all."""
    auto = arms["auto"]["ttft_s"]
    for quantile in ("p50", "p95"):
        if quantile == "p95" and auto["count"] < _MIN_TURNS_P95:
            continue  # of a scenario with a tiny model, then: see there
        others = {
            arm: one["ttft_s"][quantile]["value"]
            for arm, one in arms.items()
            if arm != "auto" and quantile in one["ttft_s"]
        }
        for whose, chosen in (("of our ways", [arm for arm in others if arm in OUR_ARMS]), ("of all", list(others))):
            title = f"{name}: auto within 5% of the best {whose}, TTFT {quantile}"
            best = min(chosen, key=others.__getitem__, default=None)
            if best is None or quantile not in auto:
                yield Check(title, passed=False, found=_NOT_MEASURED)
                continue
            own = auto[quantile]
            yield Check(
                title,
                own["value"] <= _MAX_BEHIND_BEST * others[best],
                f"{own['value']:.3f} s ({own['low']:.3f} to {own['high']:.3f}), {best} {others[best]:.3f} s",
            )
    speedup = arms["auto"]["speedup"]
    yield Check(
        f"{name}: auto not worse than no_reuse by more than 3%",
        speedup is not None and speedup["low"] >= _MIN_AGAINST_NO_REUSE,
        _NOT_MEASURED if speedup is None else _times(speedup, digits=2),
    )


def _fetch(name: str, arms: Mapping[str, Any]) -> Iterator[Check]:
    fetch, base = arms["fetch"], arms["no_reuse"]
    for point, figures in fetch["points"].items():
        yield from _at_point(f"{name}: fetch", point, figures)
    if base["itl_beside_s"]["count"]:
        ours, theirs = (arm["itl_beside_s"].get("p95") for arm in (fetch, base))
        yield Check(
            f"{name}: others' inter-token p95 in fetch within 5% of no_reuse",
            bool(ours and theirs) and ours["value"] <= _MAX_HARM * theirs["value"],
            f"{ours['value'] / theirs['value']:.2f}x: {ours['value'] * 1e3:.1f} ms, {theirs['value'] * 1e3:.1f} ms"
            if ours and theirs
            else _NOT_MEASURED,
        )
    overhead = fetch["session_overhead_p50_s"]
    yield Check(
        f"{name}: the session layer adds at most 15 ms (p50)",
        overhead is not None and overhead <= _MAX_OVERHEAD_S,
        _NOT_MEASURED
        if overhead is None
        else f"{overhead * 1e3:.1f} ms on an idle D" + _beside(fetch["session_overhead_beside_p50_s"]),
    )


def _at_point(who: str, point: str, figures: Mapping[str, Any]) -> Iterator[Check]:
    """Judge `fetch` at one length of the history."""
    speedup, floor = figures["speedup"], figures["floor_ratio_p50"]
    least = _MIN_RATIO[point]
    yield Check(
        f"{who} at least {least:.0f}x at {point} tokens",
        speedup is not None and speedup["value"] >= least,
        _NOT_MEASURED if speedup is None else f"{_times(speedup)}, {figures['turns']} turns",
    )
    for which, one in (("p50", speedup), ("p99", figures["speedup_p99"])):
        limit = figures[f"ceiling_{which}"]
        yield Check(
            f"{who} at least 70% of the limit at {point} tokens, {which}",
            one is not None and limit is not None and one["value"] >= _MIN_SHARE_OF_CEILING * limit,
            f"{one['value']:.1f} of {limit:.1f}x, {one['value'] / limit:.0%}" if one and limit else _NOT_MEASURED,
        )
    yield Check(
        f"{who} at most 1.5 times its floor at {point} tokens",
        floor is not None and floor <= _MAX_FLOOR_RATIO,
        _NOT_MEASURED if floor is None else f"{floor:.2f}",
    )


def _beside(overhead_s: float | None) -> str:
    return "" if overhead_s is None else f", {overhead_s * 1e3:.1f} ms beside other streams"


def _times(speedup: Mapping[str, float], digits: int = 1) -> str:
    value, low, high = (f"{speedup[name]:.{digits}f}" for name in ("value", "low", "high"))
    return f"{value}x ({low} to {high})"
