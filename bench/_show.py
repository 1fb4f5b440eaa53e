"""What the demo prints. Pure: text and tables, no console. May import `_result` and `_turns`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from rich.table import Table
from rich.text import Text

from bench._result import LONG_TOKENS

if TYPE_CHECKING:
    from bench._result import Check, Result
    from bench._turns import MeasuredTurn

_ROW: Final = "{:>4} {:>7} {:<11} {:<12} {:>6} {:>6} {:>7} {:>8} {:>9} {:>9}"

HEADER: Final = _ROW.format(
    "turn", "prompt", "outcome", "reason", "held", "reused", "fetched", "computed", "generated", "TTFT"
)
"""The line above the rows of one arm."""


def row(turn: MeasuredTurn) -> str:
    """Return the line of one turn; rows come one by one, as the turns end."""
    cache = turn.cache
    return _ROW.format(
        turn.turn,
        cache.prompt_tokens,
        cache.outcome,
        cache.reason,
        cache.held_tokens,
        cache.reused_tokens,
        cache.fetched_tokens,
        cache.computed_tokens,
        turn.generated_tokens,
        f"{turn.ttft_s:.2f} s",
    )


def comparison(result: Result) -> Table:
    """Return both arms side by side."""
    table = Table("turn", "held", "TTFT without reuse", "TTFT with", "ratio", "tokens", title="Time to first token")
    for column in table.columns[:-1]:
        column.justify = "right"
    for turn, without, speedup in zip(result.turns, result.turns_without_reuse, result.speedups, strict=True):
        same = turn.turn not in result.differing_turns
        table.add_row(
            str(turn.turn),
            str(turn.cache.held_tokens),
            f"{without.ttft_s:.2f} s",
            f"{turn.ttft_s:.2f} s",
            f"{speedup:.1f}",
            "same" if same else Text("DIFFERENT", style="bold red"),
            style="" if turn.cache.held_tokens >= LONG_TOKENS else "dim",
        )
    table.caption = (
        f"medians of the turns that held {LONG_TOKENS} tokens or more: {result.ratio:.1f}"
        f" (physical limit of this machine: {result.ceiling_ratio:.1f})"
    )
    return table


def verdict(check: Check) -> Text:
    """Return the line of one check."""
    word, style = ("PASS", "bold green") if check.passed else ("FAIL", "bold red")
    return Text.assemble((word, style), f"  {check.name}: {check.found}")
