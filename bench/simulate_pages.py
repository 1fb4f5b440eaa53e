"""Makes the tables of `docs/simulate.md` anew: runs `bidikv simulate` for each, and puts its figures into the page.

Takes some ten minutes of one core; `--processes` tables are made beside each other. What the page says about them is
written by hand: read it again.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

PAGE: Final = Path(__file__).resolve().parents[1] / "docs" / "simulate.md"
_ROUTES: Final = ("--sweep", "concurrent=50,100,200", "--sweep", "route=auto,fetch,local,prefill,recompute")
SWEEPS: Final = {
    "which way, 400g": ("-p", "4", "-d", "4", "--link", "400g", *_ROUTES),
    "which way, 25g": ("-p", "4", "-d", "4", "--link", "25g", *_ROUTES),
    "how many": ("-p", "4", "--concurrent", "200", "--link", "400g", "--sweep", "decode=2,4,8,16"),
    "which budget": (
        *("-p", "4", "-d", "8", "--concurrent", "100", "--link", "400g", "--route", "fetch"),
        *("--sweep", "budget=0.25,0.5,1", "--sweep", "ttl=15,60,300"),
    ),
}
"""By the name in the comment above the table."""
_NAMES: Final = {"concurrent": "sessions", "ttl": "ttl, s"}
_FIGURES: Final = (
    "first p50",
    "p50",
    "p95",
    "p99",
    "token p95, ms",
    "local / fetched / prefilled / recomputed, %",
    "busy P / D / port, %",
    "MB s",
)


def main() -> int:
    """Make the tables that were asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help=f"of {', '.join(SWEEPS)}; all where none is given")
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()
    unknown = set(options.names) - set(SWEEPS)
    if unknown:
        parser.error(f"no such table: {', '.join(sorted(unknown))}")
    names = options.names or list(SWEEPS)
    with ThreadPoolExecutor(options.processes) as pool:
        tables = dict(zip(names, pool.map(_simulate, names), strict=True))
    text = PAGE.read_text("utf-8")
    for name, cells in tables.items():
        text = with_table(text, name, table(cells))
    PAGE.write_text(text, "utf-8")
    return 0


def _simulate(name: str) -> list[dict[str, Any]]:
    command = (sys.executable, "-c", "from server_ext.cli import main; main()", "simulate", "--chunk", "1024")
    done = subprocess.run(  # noqa: S603 (our own command)
        (*command, "--json", "-", "--quiet", *SWEEPS[name]), capture_output=True, text=True, check=True
    )
    print(name, "is done", flush=True)
    cells: list[dict[str, Any]] = json.loads(done.stdout)["cells"]
    return cells


def table(cells: list[dict[str, Any]]) -> list[str]:
    """Return the lines of a table: one cell of the sweep a row, its values first."""
    axes = list(cells[0]["values"])
    head = [*(_NAMES.get(axis, axis) for axis in axes), *_FIGURES]
    rows = [[*(_word(cell["values"][axis]) for axis in axes), *_figures(cell["results"])] for cell in cells]
    return ["| " + " | ".join(row) + " |" for row in (head, *rows)]


def _figures(one: dict[str, Any]) -> list[str]:
    first, later, used, pinned = (
        one[name] for name in ("first_ttft_s", "later_ttft_s", "utilisation", "pinned_byte_s_per_avoided_token")
    )
    shares = [one["outcomes"].get(name, 0.0) for name in ("local", "fetched", "prefilled", "recomputed")]
    return [
        f"{first['p50']:.2f}",
        f"{later['p50']:.2f}",
        f"{later['p95']:.1f}",
        f"{later['p99']:.1f}",
        f"{one['token_s']['p95'] * 1e3:.0f}",
        " / ".join(f"{100 * share:.0f}" for share in shares),
        " / ".join(f"{100 * used[name]:.0f}" for name in ("prefill", "decode", "links_max")),
        f"{pinned / 1e6:.1f}" if pinned else "-",
    ]


def _word(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def with_table(text: str, name: str, lines: list[str]) -> str:
    """Return the page with another table below the comment that names it.

    Raises:
        ValueError: the page has no such comment, or no table below it.
    """
    head, *rows = lines
    rule = "|---" * (head.count("|") - 1) + "|"
    made = "\n".join([head, rule, *rows])
    found, count = re.subn(rf"(<!-- {re.escape(name)} -->\n\n?)(?:\|.*\n)+", lambda m: f"{m[1]}{made}\n", text)
    if count != 1:
        msg = f"{PAGE.name} has {count} tables named {name!r}: put a comment <!-- {name} --> above one"
        raise ValueError(msg)
    return found


if __name__ == "__main__":
    sys.exit(main())
