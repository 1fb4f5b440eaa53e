"""`bidikv simulate`: how a fleet would do under a load. What it prints is in `_simulate_text`."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from server_ext.cli._server import say_and_exit
from server_ext.cli._shared import (
    Efficiency,
    FixedMs,
    Gpu,
    Link,
    ModelName,
    Rates,
    check_number,
    find_limits,
    recorded_sessions,
    save,
)

if TYPE_CHECKING:
    from server_ext.analysis.problems import Problems
    from server_ext.simulation.rates import FleetRates
    from server_ext.simulation.scenario import Cell, Scenario

_STDOUT = "-"
_MOST_TURNS = 1_000_000
_MOST_TARGET_S = 1_000_000_000


def simulate(
    num_prefill: Annotated[int, typer.Option("--num-prefill", "-p", help="Prefill engines; 0: none.", min=0)] = 1,
    num_decode: Annotated[int, typer.Option("--num-decode", "-d", help="Decode engines.", min=1)] = 1,
    sessions: Annotated[
        int | None, typer.Option(help="Sessions in all (default: four for each in progress, at least 200).", min=1)
    ] = None,
    concurrent: Annotated[float | None, typer.Option(help="Sessions in progress at a time (default: 20).")] = None,
    turns: Annotated[
        float | None, typer.Option(help="Turns of a made-up session, in the median (default: 45, as recorded).")
    ] = None,
    traces: Annotated[
        list[str] | None, typer.Option(help="Logs or traces to draw sessions from (default: made-up agents).")
    ] = None,
    as_logged: Annotated[
        bool, typer.Option("--as-logged", help="Begin the sessions of --traces when they did.")
    ] = False,
    model: ModelName = "llama-3.1-8b",
    gpu: Gpu = "h100",
    link: Link = "400g",
    fixed_ms: FixedMs = 20.0,
    efficiency: Efficiency = 0.5,
    rates: Rates = None,
    budget: Annotated[float, typer.Option(help="Part of D's cache that leases may fill.")] = 0.5,
    ttl: Annotated[float, typer.Option(help="Life of a lease, in seconds.")] = 60.0,
    hold: Annotated[bool, typer.Option("--hold", help="Agents keep their leases alive during tool calls.")] = False,
    route: Annotated[
        Literal["auto", "fetch", "local", "prefill", "recompute"], typer.Option(help="The way of every turn.")
    ] = "auto",
    prefill_cache: Annotated[bool, typer.Option(help="Whether P's own prefix cache may hit.")] = True,
    sweep: Annotated[
        list[str] | None,
        typer.Option(
            help="Vary prefill, decode, concurrent, budget, ttl, route, link, hold, prefill_cache: NAME=V1,V2,..."
        ),
    ] = None,
    target_p99: Annotated[float | None, typer.Option(help="Seconds to the first token that 99 % shall meet.")] = None,
    seed: Annotated[int, typer.Option(help="All is drawn from it.", min=0)] = 0,
    chunk: Annotated[int, typer.Option(help="Tokens that leases are counted in; more is faster.", min=16)] = 256,
    groups: Annotated[
        int,
        typer.Option(help="Parts of the fleet with a P of their own choice each, which run on different cores.", min=1),
    ] = 1,
    json_path: Annotated[str | None, typer.Option("--json", help="Write JSON there; - prints it alone.")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress bar.")] = False,
) -> None:
    """Simulate a fleet: how many engines, which budget and TTL, what p99, where it stops to scale."""
    try:
        import server_ext.simulation.run  # noqa: F401 (whether it can be imported)
        from server_ext.analysis.problems import Problems
        from server_ext.simulation.rates import from_limits, read_rates
        from server_ext.simulation.scenario import Scenario, grid, parse_axes
    except ModuleNotFoundError as error:
        if error.name not in {"numpy", "msgspec", "simpy"}:
            raise
        say_and_exit(f"simulate needs {error.name}: pip install 'bidikv-sdk[analyze]'")
    problems = Problems()
    try:
        if target_p99 is not None:
            check_number("--target-p99", target_p99, _MOST_TARGET_S)
        limits = None
        if rates is None:
            limits = find_limits(model, gpu, link, fixed_ms, efficiency)
            speed = from_limits(limits)
        else:
            speed = read_rates(rates)
        base = Scenario(
            limits=limits,
            rates=speed,
            workload=_workload(traces, turns, speed, problems),
            prefill=num_prefill,
            decode=num_decode,
            sessions=sessions,
            concurrent=None if as_logged and traces else 20.0 if concurrent is None else concurrent,
            budget=budget,
            ttl=ttl,
            route=route,
            hold=hold,
            prefill_cache=prefill_cache,
            chunk=chunk,
            seed=seed,
            groups=groups,
        )
        scenarios = grid(base, parse_axes(sweep or []))
    except ValueError as error:
        say_and_exit(str(error))
    cells = _run(scenarios, quiet=quiet)
    _write(base, cells, problems, target_p99, json_path)


def _workload(traces: list[str] | None, turns: float | None, rates: FleetRates, problems: Problems) -> Any:
    """Return what sessions do: read from files, or made up for the model's context."""
    from server_ext.traffic import AGENT, SMALL, LogNormal

    if traces is None:
        workload = AGENT if rates.max_context_tokens >= 2 * AGENT.system_tokens else SMALL
        if turns is not None:
            check_number("--turns", turns, _MOST_TURNS)
            workload = replace(workload, num_turns=LogNormal(turns, workload.num_turns.sigma))
        return workload.fitting(min(rates.max_context_tokens, workload.max_context_tokens))
    return tuple(recorded_sessions(traces, problems))


def _run(scenarios: list[tuple[dict[str, Any], Scenario]], *, quiet: bool) -> list[Cell]:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    from server_ext.simulation.run import num_cores, run
    from server_ext.simulation.scenario import Cell

    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    cells = []
    with Progress(
        *columns, console=Console(stderr=True), transient=True, disable=quiet or not sys.stderr.isatty()
    ) as progress:
        total = sum(scenario.num_sessions for _, scenario in scenarios)
        task = progress.add_task("simulating", total=total)
        done = 0
        for values, scenario in scenarios:
            show = partial(_show_progress, progress, task, done)
            results = run(scenario, num_processes=num_cores(), on_progress=show)
            cells.append(Cell(values, scenario, results))
            done += scenario.num_sessions
            progress.update(task, completed=done)
    return cells


def _show_progress(progress: Any, task: Any, num_before: int, num_begun: int) -> None:
    progress.update(task, completed=num_before + num_begun)


def _write(
    base: Scenario, cells: list[Cell], problems: Problems, target_s: float | None, json_path: str | None
) -> None:
    from server_ext.simulation.scenario import names_of, recommend

    advice = recommend(cells, target_s)
    if json_path is not None:
        data = {
            "input": {"problems": problems.to_json()},
            "rates": base.rates.to_json(),
            "scenario": names_of(base),
            "cells": [cell.to_json() for cell in cells],
            "advice": advice.to_json(),
        }
        text = json.dumps(data, indent=1, allow_nan=False)
        if json_path == _STDOUT:
            typer.echo(text)
            return
        save(Path(json_path), text + "\n")
    from server_ext.cli._simulate_text import show

    show(base, cells, advice)
