"""Prints a report of `bidikv analyze` to the terminal."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

from rich.console import Console
from rich.markup import escape
from rich.panel import Panel
from rich.table import Table

from server_ext.analysis.problems import PROBLEMS
from server_ext.analysis.report import NOT_MODELLED
from server_ext.analysis.svg import write_value

if TYPE_CHECKING:
    from server_ext.analysis.report import Report

_TONES: Final = {"adopt": "green", "adopt for these sessions": "yellow", "do not bother": "red"}
_PERCENTILES: Final = ("p50", "p95", "p99")
_MAX_EXAMPLES: Final = 5


def show(report: Report, console: Console | None = None) -> None:
    """Print the report: the four answers, the misses, what was odd, and the verdict last, where eyes end up."""
    console = console or Console()
    _show_head(report, console)
    _show_reuse(report, console)
    _show_link(report, console)
    _show_holding(report, console)
    _show_ttft(report, console)
    _show_misses(report, console)
    _show_problems(report, console)
    _show_verdict(report, console)


def _show_head(report: Report, console: Console) -> None:
    limits, reuse = report.options.limits, report.reuse
    formats = ", ".join(f"{count:,} x {name}" for name, count in report.formats.items())
    console.print(f"[bold]{reuse.num_turns:,} turns of {reuse.num_sessions:,} sessions[/] ({formats})")
    console.print(
        f"[dim]{limits.model.name} on {limits.hardware}; limits of idle engines, queueing is not modelled[/]\n"
    )


def _show_reuse(report: Report, console: Console) -> None:
    reuse = report.reuse
    console.print("[bold]a  What repeats[/]")
    console.print(
        f"   {reuse.total_repeated_share:.1%} of the tokens of later prompts repeat the prompt before; with its reply, "
        f"{reuse.total_held_share:.1%}. {reuse.append_only_share:.1%} of the later turns only append."
    )
    table = _table("turns", "number", "prompt tokens p50", "there already p50", "p25 to p75")
    for one in reuse.by_turn:
        table.add_row(
            f"{one['first']:g} to {one['last']:g}",
            f"{one['num_turns']:,}",
            f"{one['prompt_tokens_p50']:,.0f}",
            f"{one['held_share_p50']:.1%}",
            f"{one['held_share_p25']:.1%} to {one['held_share_p75']:.1%}",
        )
    console.print(table)


def _show_link(report: Report, console: Console) -> None:
    link, limits = report.link, report.options.limits
    console.print("[bold]b  Does the link suffice[/]")
    console.print(
        f"   A later turn fetches {_p(link.fetch_bytes, 'p50', 'B')} (p95 {_p(link.fetch_bytes, 'p95', 'B')}) in "
        f"{_p(link.fetch_s, 'p50', 's')} (p95 {_p(link.fetch_s, 'p95', 's')}). Break-even: "
        f"{link.break_even_tokens:,.0f} tokens; {link.above_break_even_share:.0%} of the later turns are above."
    )
    names = list(dict.fromkeys(row["link"] for row in link.table))
    table = _table("break-even tokens, speed-up p50", *names)
    for model in dict.fromkeys(row["model"] for row in link.table):
        cells = {row["link"]: row for row in link.table if row["model"] == model}
        style = "bold" if model == limits.model.name else None
        table.add_row(model, *(_cell(cells[name]) for name in names), style=style)
    console.print(table)


def _show_holding(report: Report, console: Console) -> None:
    holding, best = report.holding, report.holding.best
    console.print("[bold]c  How long, in how much memory, how often gone[/]")
    if best is None:
        console.print("   No turn has a time, or too few have, so nothing can be said.\n")
        return
    kv = report.options.limits.model.kv_bytes_per_token
    console.print(
        f"   {holding.num_replayed:,} turns replayed on {holding.num_nodes} decode engine(s) of "
        f"{holding.pool_tokens:,} tokens{' (the first of more)' if holding.is_partial else ''}. Gap between turns: p50 "
        f"{_p(holding.gap_s, 'p50', 's')}, p95 {_p(holding.gap_s, 'p95', 's')}."
    )
    ttls = sorted({cell.ttl_s for cell in holding.grid})
    table = _table("budget: still there / found nothing", *(f"{ttl:g} s" for ttl in ttls))
    for budget in sorted({cell.budget_fraction for cell in holding.grid}):
        cells = {cell.ttl_s: cell for cell in holding.grid if cell.budget_fraction == budget}
        texts = []
        for ttl in ttls:
            text = f"{cells[ttl].held_share:.0%} / {cells[ttl].gone_share:.0%}"
            is_best = (budget, ttl) == (best.budget_fraction, best.ttl_s)
            texts.append(f"[bold green]{text}[/]" if is_best else text)
        table.add_row(f"{budget:.0%}", *texts)
    console.print(table)
    per_node = best.peak_leased_tokens * kv / holding.num_nodes / 2**30
    mean = best.mean_leased_tokens * kv / holding.num_nodes / 2**30
    reasons = ", ".join(f"{reason} {count}" for reason, count in best.reasons.most_common()) or "none"
    console.print(
        f"   At {best.budget_fraction:.0%} and {best.ttl_s:g} s: {per_node:.1f} GiB of leases per engine at the peak, "
        f"{mean:.2f} GiB on average. Turns that found less, by reason: {reasons}.\n"
    )


def _show_ttft(report: Report, console: Console) -> None:
    ttft = report.ttft
    console.print("[bold]d  Time to first token[/]")
    table = _table("", "p50", "p95", "p99")
    table.add_row("first turns, now and with reuse", *(_p(ttft.first_turn_s, p, "s") for p in _PERCENTILES))
    for name, one in ttft.baselines.items():
        label = f"{one['num_turns']:,} later turns, P's cache {name}: now"
        table.add_row(label, *(_p(one["now_s"], p, "s") for p in _PERCENTILES))
        table.add_row("    with reuse", *(_p(one["reuse_s"], p, "s") for p in _PERCENTILES), style="bold")
    if ttft.measured_s is not None:
        label = f"{ttft.num_measured:,} later turns, as logged"
        table.add_row(label, *(_p(ttft.measured_s, p, "s") for p in _PERCENTILES))
    console.print(table)


def _show_misses(report: Report, console: Console) -> None:
    found = report.misses.to_json()
    console.print("[bold]Why does my cache miss[/]")
    if not found["causes"]:
        console.print("   It does not: every prompt keeps the one before it.\n")
        return
    table = _table("cause", "turns", "tokens lost", "fix")
    table.columns[3].justify = "left"
    for one in found["causes"]:
        table.add_row(one["cause"], f"{one['count']:,}", f"{one['lost_tokens']:,}", one["fix"])
    console.print(table)
    for one in found["examples"][:_MAX_EXAMPLES]:
        console.print(
            f"   [dim]{escape(one['session'])} turn {one['turn']}: {escape(one['region'])} differs at token "
            f"{one['at_token']:,}, {one['lost_tokens']:,} lost ({one['cause']}) {escape(_change(one))}[/]"
        )
    console.print()


def _show_problems(report: Report, console: Console) -> None:
    problems = report.problems.to_json()
    if problems:
        console.print("[bold]Odd in the input[/]")
    for one in problems:
        console.print(
            f"   {one['count']:,} x {one['name']}: {PROBLEMS[one['name']]} [dim]({escape(one['first_seen'])})[/]"
        )


def _show_verdict(report: Report, console: Console) -> None:
    verdict = report.verdict
    lines = [f"- {reason}" for reason in verdict.reasons]
    if verdict.rule is not None:
        lines.insert(0, f"Which: {verdict.rule}")
        lines.insert(1, f"These save the most: {verdict.which}")
    if verdict.settings is not None:
        lines += ["", "Settings (kv_connector_extra_config.bidikv):", json.dumps(verdict.settings)]
    lines += ["", f"Not modelled: {NOT_MODELLED[0]}; see docs/analyze.md"]
    tone = _TONES[verdict.decision]
    title = f"[bold {tone}]{verdict.headline}[/]"
    console.print(Panel(escape("\n".join(lines)), title=title, border_style=tone, title_align="left"))


def _change(one: dict[str, Any]) -> str:
    if one.get("old_content") is not None or one.get("new_content") is not None:
        return f"{one.get('old_content')!r} -> {one.get('new_content')!r}"
    if one["old_hash"] or one["new_hash"]:
        return f"{(one['old_hash'] or '-')[:8]} -> {(one['new_hash'] or '-')[:8]}"
    return ""


def _table(*heads: str) -> Table:
    table = Table(box=None, pad_edge=True, header_style="dim")
    for index, head in enumerate(heads):
        table.add_column(head, justify="left" if index == 0 else "right")
    return table


def _p(found: dict[str, float] | None, name: str, unit: str) -> str:
    return "-" if found is None else write_value(found[name], unit)


def _cell(row: dict[str, Any]) -> str:
    speedup = "" if row["speedup_p50"] is None else f", {row['speedup_p50']:.1f}x"
    return f"{write_value(row['break_even_tokens'], '')}{speedup}"
