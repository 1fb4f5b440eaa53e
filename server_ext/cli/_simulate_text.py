"""Prints the answers of `bidikv simulate` to the terminal."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any, Final

from rich.console import Console
from rich.markup import escape
from rich.panel import Panel
from rich.table import Table

from bidikv_sdk.wire import OUTCOMES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from server_ext.simulation.results import Results
    from server_ext.simulation.scenario import Advice, Cell, Scenario

_LOST: Final = ("lease_expired", "lease_revoked", "over_budget")
_FILE_WIDTH: Final = 132
_GB: Final = 1e9


def show(base: Scenario, cells: Sequence[Cell], advice: Advice, console: Console | None = None) -> None:
    """Print one answer in full, or a grid as a table, and the advice last."""
    console = console or Console()
    if not console.is_terminal and len(cells) > 1:
        console.width = max(console.width, _FILE_WIDTH)  # a file has no edge to wrap at
    rates = base.rates
    console.print(f"[bold]{escape(rates.model)}[/] [dim]{escape(rates.source)}[/]")
    load = "begin as logged" if base.concurrent is None else f"{base.concurrent:g} at a time"
    console.print(
        f"[dim]{base.num_sessions:,} sessions, {load}; a pool of {rates.pool_tokens:,} tokens per engine; times to the "
        "first token in seconds[/]\n"
    )
    if len(cells) == 1:
        _show_one(base, cells[0].results, console)
    else:
        _show_grid(cells, console)
        _show_advice(advice, console)


def _show_one(base: Scenario, results: Results, console: Console) -> None:
    table = _table("time to the first token", "p50", "p95", "p99")
    for name, found, unit in (
        ("first turns", results.first_ttft_s, 1.0),
        ("later turns", results.later_ttft_s, 1.0),
        ("    of that, waiting", results.queue_s, 1.0),
        ("per token of the answer, ms", results.token_s, 1e3),
    ):
        values = ["-"] * 3 if found is None else [f"{value * unit:,.3f}" for value in found.values()]
        table.add_row(name, *values)
    console.print(table)
    console.print(f"\n   {_shares('later turns went', results.outcomes)}\n   {_shares('because', results.reasons)}")
    leases = ", ".join(f"{count:,} {name.replace('_', ' ')}" for name, count in results.leases.items())
    console.print(f"   leases: {leases}")
    used = results.utilisation
    console.print(
        f"   busy: prefill {used['prefill']:.0%}, decode {used['decode']:.0%}, links {used['links']:.1%} "
        f"(the busiest port {used['links_max']:.0%}); {results.turns_per_s:.3g} turns/s on {base.prefill}P + "
        f"{base.decode}D"
    )
    if results.pinned_byte_s_per_avoided_token is not None:
        console.print(f"   {results.pinned_byte_s_per_avoided_token / _GB:.3g} GB s pinned per avoided prefill token")
    for name, count in results.refused.items():
        console.print(f"   [yellow]{count:,} turns could not be served ({name.replace('_', ' ')})[/]")
    console.print(f"   [dim]{results.num_judged:,} of {results.num_turns:,} turns judged[/]")


def _show_grid(cells: Sequence[Cell], console: Console) -> None:
    axes = list(cells[0].values)
    table = _table(*axes, "first p50", "later p50", "p95", "p99", "token p95", *OUTCOMES, "lost", "busy P", "D", "link")
    for cell in cells:
        one = cell.results
        first, later = one.first_ttft_s or {}, one.later_ttft_s or {}
        lost = sum(one.reasons.get(reason, 0.0) for reason in _LOST)
        table.add_row(
            *(_word(cell.values[axis]) for axis in axes),
            *(f"{found[p]:.3f}" if found else "-" for found, p in ((first, "p50"), (later, "p50"))),
            *(f"{later[p]:.3f}" if later else "-" for p in ("p95", "p99")),
            f"{one.token_s['p95'] * 1e3:.1f} ms" if one.token_s else "-",
            *(f"{one.outcomes.get(name, 0.0):.0%}" for name in OUTCOMES),
            f"{lost:.0%}",
            *(f"{one.utilisation[name]:.0%}" for name in ("prefill", "decode", "links_max")),
            style="yellow" if one.refused else None,
        )
    console.print(table)


def _show_advice(advice: Advice, console: Console) -> None:
    lines = []
    if advice.best is None and not math.isfinite(advice.target_s):
        lines.append("Nothing is recommended: no fleet of the table serves all turns, or no later turn was judged.")
    elif advice.best is None:
        lines.append(f"No fleet of the table keeps 99 % of the later turns within {advice.target_s:.3g} s.")
    else:
        best = advice.best
        values = ", ".join(f"{name} {_word(value)}" for name, value in best.values.items())
        lines += [f"{values}: p99 {best.p99_s:.3f} s on {best.scenario.prefill}P + {best.scenario.decode}D"]
        what = "the target" if advice.is_given else "10 % above the best of the table"
        lines.append(f"The fewest engines and the shortest leases within {advice.target_s:.3g} s ({what}).")
    lines += advice.scaling
    if advice.best is not None:
        from server_ext.simulation.scenario import settings_of

        lines += ["", "Settings (kv_connector_extra_config.bidikv):", json.dumps(settings_of(advice.best.scenario))]
    lines += ["", "What is not modelled: see docs/simulate.md"]
    console.print(Panel(escape("\n".join(lines)), title="Recommended", title_align="left"))


def _shares(title: str, shares: dict[str, float]) -> str:
    ranked = sorted(shares.items(), key=lambda one: -one[1])
    return f"{title}: " + ", ".join(f"{name} {share:.1%}" for name, share in ranked)


def _word(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _table(*heads: str) -> Table:
    table = Table(box=None, pad_edge=True, header_style="dim")
    for index, head in enumerate(heads):
        table.add_column(head, justify="left" if index == 0 else "right")
    return table
