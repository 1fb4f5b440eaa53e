"""What several commands take and give alike: hardware as options, recorded sessions, an engine's size, files."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from server_ext.cli._server import root_of, say_and_exit

if TYPE_CHECKING:
    from server_ext.analysis.limits import Limits
    from server_ext.analysis.problems import Problems
    from server_ext.traffic import PlannedSession

_TIMEOUT_S = 30.0
_LEAST = 0.001
_MOST_FIXED_MS = 1_000_000

ModelName = Annotated[str, typer.Option("--model", help="A known model, or a config.json.")]
Gpu = Annotated[
    str, typer.Option("--gpu", help="h100, h200, b200, a100, l40s, mi300x, cpu-core, or 989TF,80GB,3350GB/s.")
]
Link = Annotated[str, typer.Option("--link", help="nvlink, 400g, 200g, 100g, 25g, or for example 12.5GB/s.")]
FixedMs = Annotated[float, typer.Option("--fixed-ms", help="What a transfer costs, whatever its size.")]
Efficiency = Annotated[float, typer.Option("--efficiency", help="Part of the peak that prefill reaches.")]
Rates = Annotated[
    Path | None, typer.Option("--rates", help="Measured rates (`bidikv rates`) in place of model, GPU and link.")
]


def find_limits(model: str, gpu: str, link: str, fixed_ms: float, efficiency: float) -> Limits:
    """Return what the hardware of the options can do.

    Raises:
        ValueError: an option names none, or its number makes no sense; the text names the option.
    """
    from server_ext.analysis.hardware import find_gpu, find_link, find_model
    from server_ext.analysis.limits import Limits

    check_number("--fixed-ms", fixed_ms, _MOST_FIXED_MS)
    check_number("--efficiency", efficiency, 1)
    return Limits(find_model(model), find_gpu(gpu), find_link(link), fixed_ms / 1e3, efficiency)


def check_number(option: str, value: float, most: float) -> None:
    """Refuse a number below 0.001 or above `most`; typer's bounds let nan through or do not quote it, by its version.

    Raises:
        ValueError: with the option, the number and what to give.
    """
    if not _LEAST <= value <= most:
        msg = f"{option} {value!r}: give a number from {_LEAST} to {most:,}"
        raise ValueError(msg)


@dataclass(frozen=True, slots=True)
class DecodeEngine:
    """What a running decode engine says of itself."""

    model: str
    """Its served name."""
    root: str
    """Where the model came from: a folder or a name; the served name where it does not say."""
    max_model_len: int
    kv_bytes_per_token: int
    """Over all layers, in the type that its cache has."""
    pool_tokens: int
    """Tokens whose KV fits."""
    step_tokens: int
    """Most tokens that a step computes."""


def find_decode_engine(base_url: str, api_key: str | None) -> DecodeEngine:
    """Ask a decode engine for its size; a model's `config.json` does not know how it is run (`--dtype`).

    Args:
        base_url: where its routes begin, `/v1` included; `/metrics` is looked for beside that.
        api_key: None where it asks for none.

    Raises:
        ValueError: it does not say; the text names the address and what to do.
    """
    import httpx

    from server_ext.cli._metrics import scrape

    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    card = _ask(f"{base_url}/models", headers, lambda said: said["data"][0])
    engine = _ask(f"{base_url}/bidikv/engine", headers, lambda said: said["engine"])
    if engine.get("role") != "decode":
        msg = f"{base_url} is a {engine.get('role')} engine: give the address of its decode engine"
        raise ValueError(msg)
    root_url = root_of(base_url)
    try:
        metrics = scrape(root_url)
        pool_tokens = int(metrics.total("bidikv_blocks", state="total")) * int(engine["block_size"])
        found = DecodeEngine(
            model=str(card["id"]),
            root=str(card.get("root") or card["id"]),
            max_model_len=int(engine["max_model_len"]),
            kv_bytes_per_token=int(metrics.total("bidikv_bytes", state="total")) // pool_tokens,
            pool_tokens=pool_tokens,
            step_tokens=int(engine["max_num_batched_tokens"]),
        )
    except (httpx.HTTPError, LookupError, TypeError, ValueError, ZeroDivisionError) as error:
        why = f"{type(error).__name__}: {error}"
    else:
        if found.kv_bytes_per_token:
            return found
        why = "no bidikv_bytes"
    msg = (
        f"{root_url}: /v1/bidikv/engine and /metrics do not tell how large the cache is ({why}): give the decode "
        "engine's own address, or let what is in front of it pass /metrics"
    )
    raise ValueError(msg)


def _ask(url: str, headers: Mapping[str, str], take: Callable[[Any], Any]) -> dict[str, Any]:
    """Return an object out of what a route says, taken from it by `take`."""
    import httpx

    try:
        # As the SDK: what the environment says of proxies holds for engines elsewhere.
        reply = httpx.get(url, headers=headers, timeout=_TIMEOUT_S)
        return dict(take(reply.raise_for_status().json()))
    except (httpx.HTTPError, ValueError, LookupError, TypeError) as error:
        msg = (
            f"{url} does not answer as a decode engine's does ({type(error).__name__}: {error}); is the address right?"
        )
        raise ValueError(msg) from error


def recorded_sessions(traces: list[str], problems: Problems | None = None) -> list[PlannedSession]:
    """Return the sessions of logs and traces; say on standard error what was odd in them.

    Args:
        traces: files and folders.
        problems: where what was odd is counted as well.

    Raises:
        ValueError: there is none, or a path does not exist.
    """
    from server_ext.analysis.problems import Problems
    from server_ext.traffic import read_sessions

    problems = Problems() if problems is None else problems
    recorded = read_sessions(traces, problems)
    for one in problems.to_json():
        typer.echo(
            f"odd in the input: {one['count']:,} x {one['name']}: {one['meaning']} ({one['first_seen']})", err=True
        )
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
