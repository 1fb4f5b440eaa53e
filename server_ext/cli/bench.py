"""`bidikv bench`: the ways of serving a turn, measured on engines that run, with your traffic or made-up agents."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from server_ext.cli._server import (
    USAGE_ERROR,
    ApiKey,
    BaseUrl,
    explain,
    find_base_url,
    make_console,
    root_of,
    say_and_exit,
)
from server_ext.cli._shared import DecodeEngine, find_decode_engine, recorded_sessions, save

if TYPE_CHECKING:
    from server_ext.analysis.hardware import Model as Shape
    from server_ext.benchmark.arms import Arm, Complete
    from server_ext.benchmark.rounds import ArmRound, Reference
    from server_ext.benchmark.scenarios import Scenario
    from server_ext.benchmark.suite import Model
    from server_ext.benchmark.summary import ScenarioResult
    from server_ext.traffic import PlannedSession

_MOST_TOKENS = 3000
_OUTPUT_SHARE = 0.2
"""Of the longest prompt with its answer, at most so much is the answer."""


@dataclass(frozen=True)
class Engines:
    """Where the arms' engines are."""

    base_url: str
    """Of D, with its version path."""
    prefill_url: str
    aggregated_url: str | None
    api_key: str | None


def bench(
    base_url: BaseUrl = None,
    prefill_url: Annotated[
        str | None, typer.Option(help="P's base URL (default: of the stack that `bidikv up` started).")
    ] = None,
    aggregated_url: Annotated[
        str | None, typer.Option(help="A stock engine of the same model, as another arm.")
    ] = None,
    api_key: ApiKey = None,
    traces: Annotated[
        list[str] | None, typer.Option(help="Logs or traces that `bidikv analyze` reads (default: made-up agents).")
    ] = None,
    sessions: Annotated[int, typer.Option(help="Sessions of each round.", min=1)] = 4,
    turns: Annotated[int, typer.Option(help="Turns of each session, at most.", min=2)] = 8,
    max_tokens: Annotated[
        int | None, typer.Option(help="Longest prompt with its answer (default: the model's context, at most 3000).")
    ] = None,
    time_divisor: Annotated[float, typer.Option(help="Divides the gaps between turns.", min=0.001)] = 20.0,
    at_once: Annotated[
        int | None, typer.Option(help="Agents at the same time (default: whoever has come, an open loop).", min=1)
    ] = None,
    rate: Annotated[float, typer.Option(help="Made-up agents that come each second of their time.", min=1e-6)] = 0.05,
    arms: Annotated[str, typer.Option(help="Which, the one that all are compared with first.")] = (
        "no_reuse,prefill_cache,local,fetch,auto"
    ),
    rounds: Annotated[int, typer.Option(help="How often every arm runs.", min=1)] = 5,
    seed: Annotated[int, typer.Option(help="Of conversations and orders.", min=0)] = 1,
    model: Annotated[
        str | None, typer.Option(help="A known model, or a config.json (default: the engine's own, where it is here).")
    ] = None,
    html: Annotated[Path | None, typer.Option(help="Write one page with tables and plots.")] = None,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write all figures there.")] = None,
) -> None:
    """Measure every way of serving a turn on engines that run and have nothing else to do.

    Their prefix caches are emptied before each arm, and all leases go with them: never on a deployment that serves
    others. The engines must have been started with VLLM_SERVER_DEV_MODE=1.
    """
    import asyncio
    from importlib.util import find_spec

    import httpx

    from bidikv_sdk import BidiKVError
    from server_ext.benchmark.engines import CannotReset

    for name in ("numpy", "msgspec", *(["matplotlib"] if html is not None else [])):
        if find_spec(name) is None:
            say_and_exit(f"bench needs {name}: pip install 'bidikv-sdk[bench]'")
    engines = Engines(
        find_base_url(base_url), (prefill_url or _local_prefill_url()).rstrip("/"), aggregated_url, api_key
    )
    try:
        decode = find_decode_engine(engines.base_url, engines.api_key)
        most = min(max_tokens or _MOST_TOKENS, decode.max_model_len)
        scenario = _scenario(
            _planned(traces, sessions, rate, seed),
            turns,
            most,
            time_divisor,
            at_once,
            _arms(arms, aggregated_url),
        )
        result = asyncio.run(_measure(engines, scenario, _model(model, decode), rounds, seed))
    except BidiKVError as error:
        say_and_exit(explain(error, engines.base_url))
    except httpx.HTTPError as error:
        say_and_exit(f"an engine does not answer as it should: {error or type(error).__name__}")
    except (CannotReset, ValueError, OSError) as error:
        say_and_exit(str(error))
    _write(result, html, json_path)
    if result.ended_early is not None:
        say_and_exit(f"ended early, so these are fewer rounds than were asked for: {result.ended_early}")


def _local_prefill_url() -> str:
    from server_ext.launch.stack import default_state_dir
    from server_ext.launch.state import read_state

    state = read_state(default_state_dir())
    found = [] if state is None else [engine.url for engine in state.engines if engine.role == "prefill"]
    if not found:
        say_and_exit("no prefill engine: give --prefill-url, or start a stack with `bidikv up`", USAGE_ERROR)
    return found[0]


def _model(text: str | None, decode: DecodeEngine) -> Model:
    """Return the engines' model, in the shape of `text`, or else of what they say, where that is known or here."""
    from server_ext.analysis.hardware import find_model
    from server_ext.benchmark.suite import Model

    shape = find_model(text) if text is not None else _known(decode.root) or _known(decode.model)
    if shape is None:
        msg = f"the engine's model {decode.root!r} is neither known nor a folder here: give its config.json as --model"
        raise ValueError(msg)
    return Model(decode.model, shape.attention_tokens, decode.kv_bytes_per_token)


def _known(name: str) -> Shape | None:
    from server_ext.analysis.hardware import UnknownHardware, find_model

    try:
        return find_model(name)
    except UnknownHardware:
        return None


def _arms(text: str, aggregated_url: str | None) -> tuple[str, ...]:
    from server_ext.benchmark.arms import ROUTES

    names = tuple(name.strip() for name in text.split(",") if name.strip())
    unknown = [name for name in names if name not in ROUTES]
    if unknown or not names:
        msg = f"--arms {text!r}: give some of {', '.join(ROUTES)}"
        raise ValueError(msg)
    return (*names, "aggregated") if aggregated_url else names


def _planned(traces: list[str] | None, sessions: int, rate: float, seed: int) -> list[PlannedSession]:
    from server_ext.traffic import AGENT, generate

    if traces is None:
        return list(generate(AGENT, sessions, seed=seed, rate_per_s=rate))
    return recorded_sessions(traces)[:sessions]


def _scenario(
    planned: list[PlannedSession],
    turns: int,
    most: int,
    time_divisor: float,
    at_once: int | None,
    arms: tuple[str, ...],
) -> Scenario:
    from dataclasses import replace

    from server_ext.benchmark.scenarios import Scenario
    from server_ext.traffic import fitted

    first_s = min(session.start_s for session in planned)
    sessions = [
        fitted(
            replace(session, start_s=session.start_s - first_s, turns=session.turns[:turns]),
            max_tokens=most,
            max_output_tokens=max(1, int(most * _OUTPUT_SHARE) - 1),
            time_divisor=time_divisor,
        )
        for session in planned
    ]
    return Scenario(
        name="traffic",
        what=f"{len(sessions)} sessions of at most {turns} turns and {most} tokens, gaps divided by {time_divisor:g}.",
        plan=lambda _: sessions,
        arms=arms,
        at_once=at_once,
    )


async def _measure(engines: Engines, scenario: Scenario, model: Model, rounds: int, seed: int) -> ScenarioResult:
    import httpx

    from bidikv_sdk import AsyncBidiKV
    from server_ext.benchmark.arms import ROUTES, PlainArm, SessionArm, one_engine
    from server_ext.benchmark.engines import RunningEngines, prefill_cache_of
    from server_ext.benchmark.suite import run_scenario

    headers = {"Authorization": f"Bearer {engines.api_key}"} if engines.api_key else {}
    # The engines close idle connections after 5 s: one that is about to be closed must not be used.
    limits = httpx.Limits(keepalive_expiry=1.0)
    async with (
        httpx.AsyncClient(timeout=600, limits=limits, headers=headers) as http,
        AsyncBidiKV(engines.base_url, engines.api_key, model=model.name) as client,
    ):
        pair = RunningEngines(http, (engines.prefill_url, root_of(engines.base_url)))

        def make_arms(reference: Reference) -> Mapping[str, Arm]:
            arms: dict[str, Arm] = {}
            for name in scenario.arms:
                if name in ROUTES:
                    # Emptying waits for an idle P, which must not take the waiting out of an open loop.
                    is_emptied = name == "fetch" and scenario.at_once == 1
                    missing = prefill_cache_of(http, engines.prefill_url) if is_emptied else None
                    arms[name] = SessionArm(name, client, pair, missing)
                elif engines.aggregated_url is not None:
                    url = engines.aggregated_url.rstrip("/")
                    complete: Complete = one_engine(http, url, model.name)
                    arms[name] = PlainArm(name, complete, reference.continuation, RunningEngines(http, (url,)))
            return arms

        return await run_scenario(scenario, make_arms, model=model, num_rounds=rounds, seed=seed, on_part=_show)


def _show(part: ArmRound) -> None:
    typer.echo(f"round {part.round + 1}  {part.arm:14} {len(part.samples)} turns in {part.seconds:.1f} s", err=True)


def _write(result: ScenarioResult, html: Path | None, json_path: Path | None) -> None:
    import os
    from importlib.metadata import version
    from tempfile import TemporaryDirectory

    from rich.markdown import Markdown

    from server_ext.benchmark.suite import to_file
    from server_ext.benchmark.table import to_markdown

    content = to_file([result], machine={"cores": os.cpu_count()}, versions={"bidikv": version("bidikv-sdk")})
    make_console().print(Markdown(to_markdown(content)))
    if json_path is not None:
        save(json_path, json.dumps(content, indent=2) + "\n")
    if html is not None:
        from server_ext.benchmark.page import to_html, write_plots

        with TemporaryDirectory() as folder:
            save(html, to_html(content, write_plots(content, Path(folder))))
