"""Writes a result file's content (see `summary`) as Markdown: what each arm costs, scenario by scenario. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

_HEAD = (
    "arm",
    "turns",
    "TTFT p50",
    "p95",
    "p99",
    "against {base}",
    "first turn",
    "TTFT beside others, p50",
    "own ITL p50",
    "others' ITL p50",
    "p95",
    "p99",
    "turns/s",
    "MB moved / turn",
    "pinned MB·s / token saved",
    "of the floor",
    "session layer p50",
    "beside others",
    "tokens wrong",
)


def to_markdown(result: Mapping[str, Any]) -> str:
    """Return all scenarios' tables.

    Args:
        result: the content of `bench.json`.
    """
    parts = []
    for name, scenario in result["scenarios"].items():
        arms: dict[str, Any] = scenario["arms"]
        parts += [f"### {name}", "", scenario["what"], "", _notes(scenario), ""]
        # The first arm is what the others are compared with.
        parts += _table(
            [one.format(base=next(iter(arms))) for one in _HEAD], (_row(arm, figures) for arm, figures in arms.items())
        )
        points = list(next(iter(arms.values()))["points"])
        if points:
            parts += ["", "By length of the history:", ""]
            head = ["arm", *(f"{name} at {int(point):,}" for point in points for name in ("TTFT", "ratio", "limit"))]
            parts += _table(head, (_point_row(arm, figures) for arm, figures in arms.items()))
        parts += [""]
    return "\n".join(parts)


def _notes(scenario: Mapping[str, Any]) -> str:
    """Return what the table has no column for."""
    notes = [f"Model {scenario['model']}, {scenario['seconds'] / 60:.1f} minutes."]
    rates = scenario["rates"]
    if rates is not None:
        fixed_ms, token_ms = rates["prefill_fixed_s"] * 1e3, rates["prefill_token_s"] * 1e3
        read_ms, mb_per_s = rates["fetch_fixed_s"] * 1e3, rates["fetch_bytes_per_s"] / 1e6
        notes.append(
            f"Rates of this run: prefill {fixed_ms:.0f} ms + {token_ms:.2f} ms a token of a short prompt, reads "
            f"{read_ms:.1f} ms + {mb_per_s:.0f} MB/s, {rates['decode_step_s'] * 1e3:.1f} ms a decode step."
        )
    for arm, times in scenario["warm_up_ttft_s"].items():
        told = " and ".join(f"{one:.2f} s" for one in times)
        notes.append(f"The warm-up's turns on the engines of `{arm}`, left out below, took {told}.")
    return " ".join(notes)


def _row(arm: str, figures: Mapping[str, Any]) -> list[str]:
    ttft, beside_s, beside = figures["ttft_s"], figures["ttft_beside_s"], figures["itl_beside_s"]
    turns = figures["turns"] or 1
    pinned = figures["pinned_byte_s_per_avoided_token"]
    return [
        f"`{arm}`",
        str(ttft["count"]),
        *(_time(ttft.get(name)) for name in ("p50", "p95", "p99")),
        _ratio(figures["speedup"]),
        _time(figures["ttft_first_turn_s"].get("p50")),
        _time(beside_s.get("p50")),
        _time(figures["itl_s"].get("p50")),
        *(_time(beside.get(name)) for name in ("p50", "p95", "p99")),
        f"{figures['turns_per_s']:.2f}" if figures["turns_per_s"] else "",
        f"{figures['bytes_moved'] / 1e6 / turns:.1f}" if figures["bytes_moved"] is not None else "",
        f"{pinned / 1e6:.2f}" if pinned is not None else "",
        f"{figures['floor_ratio_p50']:.2f}x" if figures["floor_ratio_p50"] else "",
        *(_ms(figures[name]) for name in ("session_overhead_p50_s", "session_overhead_beside_p50_s")),
        str(figures["tokens_wrong"]),
    ]


def _point_row(arm: str, figures: Mapping[str, Any]) -> list[str]:
    cells = [f"`{arm}`"]
    for point in figures["points"].values():
        limit = point["ceiling_p50"]
        cells += [_time(point["ttft_s"].get("p50")), _ratio(point["speedup"]), f"{limit:.1f}x" if limit else ""]
    return cells


def _table(head: Iterable[str], rows: Iterable[list[str]]) -> list[str]:
    head = list(head)
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return ["| " + " | ".join(line) + " |" for line in lines]


def _ms(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds * 1e3:.1f} ms"


def _time(estimate: Mapping[str, float] | None) -> str:
    """Write a time with its interval, in a unit that suits it."""
    if estimate is None:
        return ""
    factor, unit, digits = (1e3, "ms", 1) if estimate["high"] < 1 else (1.0, "s", 2)
    value, low, high = (estimate[name] * factor for name in ("value", "low", "high"))
    return f"{value:.{digits}f} {unit} ({low:.{digits}f} to {high:.{digits}f})"


def _ratio(estimate: Mapping[str, float] | None) -> str:
    if estimate is None:
        return ""
    return f"{estimate['value']:.2f}x ({estimate['low']:.2f} to {estimate['high']:.2f})"
