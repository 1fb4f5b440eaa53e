"""What several commands take and give alike: hardware as options, recorded sessions, an engine's model, files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from server_ext.cli._server import say_and_exit

if TYPE_CHECKING:
    from server_ext.analysis.hardware import Model
    from server_ext.analysis.limits import Limits
    from server_ext.traffic import PlannedSession

ModelName = Annotated[str, typer.Option("--model", help="A known model, or a config.json.")]
Gpu = Annotated[
    str, typer.Option("--gpu", help="h100, h200, b200, a100, l40s, mi300x, cpu-core, or 989TF,80GB,3350GB/s.")
]
Link = Annotated[str, typer.Option("--link", help="nvlink, 400g, 200g, 100g, 25g, or for example 12.5GB/s.")]
FixedMs = Annotated[float, typer.Option("--fixed-ms", help="What a transfer costs, whatever its size.", min=0.001)]
Efficiency = Annotated[
    float, typer.Option("--efficiency", help="Part of the peak that prefill reaches.", min=0.001, max=1)
]
Rates = Annotated[
    Path | None, typer.Option("--rates", help="Measured rates (`bidikv rates`) in place of model, GPU and link.")
]


def find_limits(model: str, gpu: str, link: str, fixed_ms: float, efficiency: float) -> Limits:
    """Return what the hardware of the options can do.

    Raises:
        UnknownHardware: an option names none; the text names the option.
    """
    from server_ext.analysis.hardware import find_gpu, find_link, find_model
    from server_ext.analysis.limits import Limits

    return Limits(find_model(model), find_gpu(gpu), find_link(link), fixed_ms / 1e3, efficiency)


def find_engine_model(text: str | None, card: Mapping[str, Any]) -> Model:
    """Return the model of a running engine.

    Args:
        text: a known model or a `config.json`; None: what the engine says, if that is known or a folder here.
        card: the engine's entry of `/v1/models`.

    Raises:
        ValueError: it is neither; the text says what to give.
    """
    from server_ext.analysis.hardware import UnknownHardware, find_model

    name = text if text is not None else str(card.get("root") or card.get("id"))
    try:
        return find_model(name)
    except UnknownHardware as error:
        if text is not None or "id" not in card:
            raise
        try:
            return find_model(str(card["id"]))
        except UnknownHardware:
            msg = f"the engine's model {name!r} is neither known nor a folder here: give its config.json as --model"
            raise ValueError(msg) from error


def recorded_sessions(traces: list[str]) -> list[PlannedSession]:
    """Return the sessions of logs and traces.

    Raises:
        ValueError: there is none, or a path does not exist.
    """
    from server_ext.analysis.problems import Problems
    from server_ext.traffic import read_sessions

    recorded = read_sessions(traces, Problems())
    if not recorded:
        msg = f"--traces {' '.join(traces)}: there is no session in it; `bidikv analyze` says what was read"
        raise ValueError(msg)
    return recorded


def save(path: Path, text: str) -> None:
    """Write a file and say so; ends the command where that cannot be."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        say_and_exit(f"{path} cannot be written: {error.strerror}")
    typer.echo(f"wrote {path}", err=True)
