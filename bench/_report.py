"""The page of a run: what it was run on, its tables, and its bars. Pure: Markdown from the content of `bench.json`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from server_ext.benchmark.table import to_markdown

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from bench._result import Check


def report(content: Mapping[str, Any], found: Iterable[Check]) -> str:
    """Return the page.

    Args:
        content: of `bench.json`.
        found: its bars.
    """
    versions = ", ".join(f"{name} {value}" for name, value in content["versions"].items())
    minutes = sum(one["seconds"] for one in content["scenarios"].values()) / 60
    intro = (
        f"Written by `make bench` on {content['machine']['cores']} x {content['machine']['cpu']}, in float32, with "
        f"{versions}; {minutes:.0f} minutes of measuring. `docs/bench.md` says what is compared, how, and what favours "
        "whom. Intervals in brackets are of 95 %."
    )
    lines = [
        "# Every way of serving an agent's turns, measured in one run",
        "",
        intro,
        "",
        to_markdown(content),
        "### The bars",
        "",
        "| expected | found | |",
        "|---|---|---|",
    ]
    for check in found:
        verdict = "met" if check.passed else "**missed**"
        lines.append(f"| {check.name} | {check.found} | {verdict} |")
    return "\n".join(lines) + "\n"
