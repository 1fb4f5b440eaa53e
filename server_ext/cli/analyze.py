"""`bidikv analyze`: reads logs and says whether reuse pays. What it prints is in `_analyze_text`."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from server_ext.cli._server import say_and_exit
from server_ext.cli._shared import Efficiency, FixedMs, Gpu, Link, ModelName, Rates, find_limits, save

if TYPE_CHECKING:
    from server_ext.analysis.limits import Limits
    from server_ext.analysis.problems import Problems
    from server_ext.analysis.report import Options, Report

_STDIN = "-"


def analyze(
    paths: Annotated[
        list[str], typer.Argument(metavar="PATH...", help="Logs, folders of logs, or - (standard input).")
    ],
    html: Annotated[Path | None, typer.Option(help="Write one self-contained page with plots.")] = None,
    json_path: Annotated[str | None, typer.Option("--json", help="Write JSON there; - prints it alone.")] = None,
    model: ModelName = "llama-3.1-8b",
    gpu: Gpu = "h100",
    link: Link = "400g",
    fixed_ms: FixedMs = 20.0,
    efficiency: Efficiency = 0.5,
    rates: Rates = None,
    budget: Annotated[str, typer.Option(help="Parts of D's cache that leases may fill.")] = "0.1,0.25,0.5,0.75,1",
    ttl: Annotated[str, typer.Option(help="Lives of a lease, in seconds.")] = "15,60,120,300,480,900",
    decode_nodes: Annotated[int | None, typer.Option(help="Decode engines (default: by the load).", min=1)] = None,
    replay_turns: Annotated[int, typer.Option(help="Replay no more than the first so many turns.", min=1)] = 20_000,
    show_content: Annotated[bool, typer.Option("--show-content", help="Quote what changed at a cache miss.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress bar.")] = False,
) -> None:
    """Say from your own request logs whether decode-to-prefill reuse pays, and why caches miss."""
    try:
        from server_ext.analysis.memory import make_settings
        from server_ext.analysis.report import Options
    except ModuleNotFoundError as error:
        if error.name not in {"numpy", "msgspec"}:
            raise
        say_and_exit(f"analyze needs {error.name}: pip install 'bidikv-sdk[analyze]'")
    try:
        limits = find_limits(model, gpu, link, fixed_ms, efficiency)
        options = Options(
            limits=limits if rates is None else _read_rates(rates),
            budgets=_numbers("--budget", budget),
            ttls_s=_numbers("--ttl", ttl),
            num_nodes=decode_nodes,
            max_replayed_turns=replay_turns,
            show_content=show_content,
        )
        for one in options.budgets:
            for ttl_s in options.ttls_s:
                make_settings(one, ttl_s)
        if options.limits.pool_tokens < 1:
            say_and_exit(f"--gpu {gpu} has no room for a cache beside the weights of {model}")
        report = _run(paths, options, quiet=quiet)
    except ValueError as error:
        say_and_exit(str(error))
    _write(report, html, json_path)


def _read_rates(path: Path) -> Limits:
    from server_ext.simulation.rates import read_rates

    return read_rates(path).to_limits()


def _run(paths: list[str], options: Options, *, quiet: bool) -> Report:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    from server_ext.analysis.problems import Problems
    from server_ext.analysis.report import analyze as run
    from server_ext.analysis.sources import find_files

    problems = Problems()
    files = find_files([path for path in paths if path != _STDIN], problems)
    columns = (TextColumn("{task.description:8}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(
        *columns, console=Console(stderr=True), transient=True, disable=quiet or not sys.stderr.isatty()
    ) as progress:
        total = sum(file.stat().st_size for file in files) or None
        reading = progress.add_task("reading", total=None if _STDIN in paths else total)
        replaying = progress.add_task("replaying", total=len(options.budgets) * len(options.ttls_s))
        return run(
            _sources(paths, files, problems, lambda num_bytes: progress.advance(reading, num_bytes)),
            problems,
            options,
            on_cell=lambda done, _total: progress.update(replaying, completed=done),
        )


def _sources(paths: list[str], files: list[Path], problems: Problems, on_bytes: Any) -> Iterator[Any]:
    from server_ext.analysis.sources import read_file, read_lines

    for file in files:
        yield read_file(file, problems, on_bytes)
    if _STDIN in paths:
        yield read_lines(sys.stdin.buffer, "standard input", problems)


def _write(report: Report, html: Path | None, json_path: str | None) -> None:
    if json_path is not None:
        text = json.dumps(report.to_json(), indent=1, allow_nan=False)
        if json_path == _STDIN:
            typer.echo(text)
        else:
            save(Path(json_path), text + "\n")
    if html is not None:
        from server_ext.analysis.html import to_html

        save(html, to_html(report))
    if json_path != _STDIN:
        from server_ext.cli._analyze_text import show

        show(report)


def _numbers(option: str, text: str) -> tuple[float, ...]:
    try:
        numbers = tuple(float(part) for part in text.split(",") if part.strip())
    except ValueError:
        numbers = ()
    if not numbers:
        msg = f"{option} {text!r} is not a list of numbers, for example {option} 0.25,0.5"
        raise ValueError(msg)
    return numbers
