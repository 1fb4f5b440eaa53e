"""Draws a result file (see `summary`): PNG plots, and one HTML page that holds them all. Needs matplotlib.

`write_plots(result, folder)` and then `to_html(result, plots)`.
"""

from __future__ import annotations

import base64
from html import escape
from typing import TYPE_CHECKING, Any, Final

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from server_ext.benchmark.table import to_markdown

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

_STYLE: Final = """
body{font:15px/1.5 system-ui,sans-serif;max-width:1180px;margin:0 auto;padding:24px;color:#1b1f27}
img{max-width:100%}table{border-collapse:collapse;font-size:13px;display:block;overflow-x:auto}
td,th{padding:4px 8px;border-bottom:1px solid #e3e7ee;text-align:right;white-space:nowrap}
td:first-child,th:first-child{text-align:left}code{font:13px monospace}
"""
_DPI: Final = 130


def write_plots(result: Mapping[str, Any], folder: Path) -> dict[str, list[Path]]:
    """Draw each scenario and return the files by scenario.

    Args:
        result: the content of `bench.json`.
        folder: made where it is not there.
    """
    folder.mkdir(parents=True, exist_ok=True)
    written: dict[str, list[Path]] = {}
    for name, scenario in result["scenarios"].items():
        arms = scenario["arms"]
        figures = {"ttft": _dots(f"{name}: TTFT of later turns", arms, "ttft_s")}
        if any(figure["itl_beside_s"]["count"] for figure in arms.values()):
            figures["itl"] = _dots(f"{name}: inter-token latency of the requests beside", arms, "itl_beside_s")
        if any(figure["points"] for figure in arms.values()):
            figures["points"] = _points(f"{name}: TTFT by length of the history", arms)
        written[name] = [_save(figure, folder / f"{name}_{kind}.png") for kind, figure in figures.items()]
    return written


def to_html(result: Mapping[str, Any], plots: Mapping[str, list[Path]]) -> str:
    """Return one HTML page with tables and plots; it loads nothing from anywhere."""
    machine = ", ".join(f"{name} {value}" for name, value in {**result["machine"], **result["versions"]}.items())
    images = "".join(
        f'<figure><img alt="{escape(file.stem)}" src="data:image/png;base64,'
        f'{base64.b64encode(file.read_bytes()).decode()}"></figure>'
        for files in plots.values()
        for file in files
    )
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>bidikv bench</title><style>{_STYLE}</style>'
        f"<h1>What each way of serving a turn costs</h1><p>{escape(machine)}</p>"
        f"{_html_tables(to_markdown(result))}{images}</html>\n"
    )


def _dots(title: str, arms: Mapping[str, Any], name: str) -> Figure:
    """Draw p50, p95 and p99 of each arm with their intervals."""
    figure = Figure(figsize=(9, 0.9 + 0.42 * len(arms)), layout="constrained")
    axes = figure.subplots()
    names = list(arms)[::-1]
    for offset, (quantile, color) in enumerate((("p50", "#2456c8"), ("p95", "#d9622b"), ("p99", "#8a4fc4"))):
        found = [(at, arms[arm][name][quantile]) for at, arm in enumerate(names) if arms[arm][name].get(quantile)]
        if not found:
            continue
        values = [one["value"] for _, one in found]
        # Dots: the length of a bar means nothing where an axis has no zero.
        axes.errorbar(
            values,
            [at + 0.26 * (1 - offset) for at, _ in found],
            xerr=_interval([one for _, one in found]),
            fmt="o",
            markersize=5,
            color=color,
            label=quantile,
            elinewidth=0.8,
        )
    axes.set_yticks(range(len(names)), names)
    axes.set_xscale("log")
    axes.set_xlabel("seconds")
    axes.set_title(title, fontsize=11)
    axes.grid(axis="x", alpha=0.3)
    axes.legend(fontsize=8)
    return figure


def _points(title: str, arms: Mapping[str, Any]) -> Figure:
    """Draw the median TTFT of each arm over the history's length."""
    figure = Figure(figsize=(9, 4.5), layout="constrained")
    axes = figure.subplots()
    for arm, figures in arms.items():
        found = [point for point in figures["points"].values() if point["ttft_s"].get("p50")]
        medians = [point["ttft_s"]["p50"] for point in found]
        axes.errorbar(
            [point["prompt_tokens_p50"] for point in found],
            [one["value"] for one in medians],
            yerr=_interval(medians),
            marker="o",
            label=arm,
            elinewidth=0.8,
        )
    axes.set_yscale("log")
    axes.set_xlabel("tokens of the prompt")
    axes.set_ylabel("seconds")
    axes.set_title(title, fontsize=11)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    return figure


def _interval(found: Sequence[Mapping[str, float]]) -> list[list[float]]:
    """Return how far the intervals reach below and above their values: [2][num_values]."""
    return [
        [max(one["value"] - one["low"], 0.0) for one in found],
        [max(one["high"] - one["value"], 0.0) for one in found],
    ]


def _save(figure: Figure, path: Path) -> Path:
    FigureCanvasAgg(figure)
    figure.savefig(path, dpi=_DPI)
    return path


def _html_tables(markdown: str) -> str:
    """Turn the Markdown of `table`, and no other, into HTML."""
    parts: list[str] = []
    in_table = False
    for line in markdown.splitlines():
        if line.startswith("| ---"):
            continue
        if line.startswith("|"):
            cells = [escape(cell.strip()).strip("`") for cell in line.strip("|").split("|")]
            tag = "td" if in_table else "th"
            parts.append(("" if in_table else "<table>") + _tr(cells, tag))
            in_table = True
            continue
        if in_table:
            parts.append("</table>")
            in_table = False
        if line.startswith("### "):
            parts.append(f"<h2>{escape(line[4:])}</h2>")
        elif line:
            parts.append(f"<p>{escape(line)}</p>")
    return "".join([*parts, "</table>" if in_table else ""])


def _tr(cells: list[str], tag: str) -> str:
    return f"<tr>{''.join(f'<{tag}>{cell}</{tag}>' for cell in cells)}</tr>"
