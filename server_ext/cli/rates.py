"""`bidikv rates`: measures what prefill, fetch, hand-over and decode take on running engines."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from server_ext.cli._server import ApiKey, local_base_url, say_and_exit
from server_ext.cli._shared import DecodeEngine, find_decode_engine, save

if TYPE_CHECKING:
    from server_ext.simulation.rates import FleetRates

_STDOUT = "-"
_DEFAULT_LONGEST = 2048
_BESIDE_TOKENS = 256
"""What a template adds, the new tokens behind a history, and the answer."""


def rates(
    url: Annotated[str | None, typer.Option(help="Base URL of a decode engine (default: that of `bidikv up`).")] = None,
    api_key: ApiKey = None,
    max_tokens: Annotated[
        int | None, typer.Option(help="Longest prompt (default: half of the context, at most 2048).", min=100)
    ] = None,
    repeats: Annotated[int, typer.Option(help="How often each point is measured.", min=1)] = 1,
    prefill_step_tokens: Annotated[
        int | None,
        typer.Option(help="P's max_num_batched_tokens (default: as D's, which D tells of itself).", min=1),
    ] = None,
    out: Annotated[str, typer.Option(help="Where to write the rates; - prints them alone.")] = "rates.json",
) -> None:
    """Measure your own engines, for `simulate --rates` and `analyze --rates`. They must be idle otherwise."""
    from bidikv_sdk import BidiKVError

    try:
        import server_ext.simulation.fit  # noqa: F401 (whether it can be imported)
    except ModuleNotFoundError as error:
        if error.name not in {"numpy", "msgspec"}:
            raise
        say_and_exit(f"rates needs {error.name}: pip install 'bidikv-sdk[analyze]'")
    base_url = _base_url(url)
    try:
        engine = find_decode_engine(base_url, api_key)
        longest = _longest(max_tokens, engine.max_model_len)
        found, raw = asyncio.run(
            _measure(base_url, api_key, engine, longest, repeats, prefill_step_tokens or engine.step_tokens)
        )
    except (BidiKVError, ValueError) as error:
        say_and_exit(str(error))
    text = json.dumps({**found.to_json(), "samples": raw}, indent=1)
    if out == _STDOUT:
        typer.echo(text)
        return
    save(Path(out), text + "\n")
    _show(found)


def _base_url(url: str | None) -> str:
    url = local_base_url() if url is None else url
    if url is None:
        say_and_exit("no stack is running: start one with `bidikv up`, or give --url")
    url = url.rstrip("/")
    return url if url.endswith("/v1") else url + "/v1"


def _longest(max_tokens: int | None, context: int) -> int:
    longest = max_tokens or min(context // 2, _DEFAULT_LONGEST)
    most = context - _BESIDE_TOKENS
    if longest > most:
        msg = f"--max-tokens {longest} does not fit into the context of {context}: give at most {most}"
        raise ValueError(msg)
    return longest


async def _measure(
    base_url: str, api_key: str | None, engine: DecodeEngine, longest: int, repeats: int, prefill_step_tokens: int
) -> tuple[FleetRates, dict[str, Any]]:
    from bidikv_sdk import AsyncBidiKV
    from server_ext.cli._measure import Measurement
    from server_ext.simulation.fit import Shape, fit_rates

    async with AsyncBidiKV(base_url, api_key=api_key) as client:
        measured = Measurement(client, longest, repeats, _say)
        await measured.run()
    shape = Shape(
        model=engine.model,
        source=f"measured with prompts of up to {longest} tokens",
        kv_bytes_per_token=engine.kv_bytes_per_token,
        max_context_tokens=engine.max_model_len,
        pool_tokens=engine.pool_tokens,
        step_tokens=engine.step_tokens,
        prefill_step_tokens=prefill_step_tokens,
    )
    return fit_rates(shape, measured.turns, measured.decodes, measured.besides), measured.raw()


def _show(found: FleetRates) -> None:
    typer.echo(
        f"{found.model}: a pool of {found.pool_tokens:,} tokens\n"
        f"  prefill   {1 / found.prefill_s_per_token:,.0f} tokens/s for short prompts, half of it attention at "
        f"{found.attention_tokens:,.0f}; {found.prefill_fixed_s * 1e3:.1f} ms each\n"
        f"  fetch     {found.fetch_s_per_token * 1e6:,.1f} us/token, {found.fetch_fixed_s * 1e3:.1f} ms each\n"
        f"  hand over {found.handover_s_per_token * 1e6:,.1f} us/token, {found.handover_fixed_s * 1e3:.1f} ms each\n"
        f"  decode    {found.decode_step_s * 1e3:.1f} ms a step, {found.decode_s_per_sequence * 1e3:.2f} ms for each "
        f"further sequence, {found.decode_s_per_context_token * 1e6:.2f} us per token of context\n"
        f"  control   {found.control_s * 1e3:.1f} ms\n"
        f"  beside each other, prefills take {found.prefill_slowdown:.2f} times as long, and decode steps "
        f"{found.decode_slowdown:.2f} times;\n"
        f"  calls wait for {found.control_steps:.1f} steps of a busy decode engine, hand-overs for "
        f"{found.handover_steps:.1f}"
    )


def _say(text: str) -> None:
    typer.echo(text, err=True)
