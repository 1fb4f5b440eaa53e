"""Every way of serving an agent's turns, measured in one run on this machine (`make bench`).

Starts all engines that the arms need, lets them take turns, writes `out/bench.json`, `out/bench.md`, plots and one HTML
page, and judges the bars. The exit status is 1 where one is missed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import sys
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import httpx
from rich.console import Console

from bench._bars import checks
from bench._engine_sets import EngineSets
from bench._machine import versions
from bench._plain_engine import PlainEngine
from bench._show import verdict
from bench.faults import leave_in_order
from bidikv_sdk import AsyncBidiKV
from server_ext.analysis.hardware import read_model
from server_ext.benchmark.arms import ROUTES, PlainArm, SessionArm, one_engine
from server_ext.benchmark.engines import RunningEngines, prefill_cache_of
from server_ext.benchmark.limits import kv_bytes_per_token
from server_ext.benchmark.page import write_page, write_plots
from server_ext.benchmark.scenarios import LONG_AGENT, SHORT_CHAT, STOCK_ARMS
from server_ext.benchmark.suite import Model, run_scenario, to_file
from server_ext.benchmark.table import to_markdown
from server_ext.launch.command import ROLES, StackConfig
from server_ext.launch.model import SMOLLM2, ensure_smollm2
from server_ext.launch.stack import ensure_secret, free_ports

if TYPE_CHECKING:
    from collections.abc import Mapping

    from server_ext.benchmark.arms import Arm, Complete
    from server_ext.benchmark.rounds import ArmRound, Reference
    from server_ext.benchmark.scenarios import Scenario
    from server_ext.benchmark.summary import ScenarioResult

OUT: Final = Path(__file__).resolve().parents[1] / "out"
_KV_BYTES: Final = 768 << 20

console = Console(highlight=False)


@dataclass(frozen=True)
class Bench:
    """What arms are made of."""

    sets: EngineSets
    http: httpx.AsyncClient
    client: AsyncBidiKV
    served_name: str

    def engines(self, name: str) -> RunningEngines:
        """Return a set's engines as arms want them."""
        return RunningEngines(
            self.http, self.sets.sets[name].urls, lambda: self.sets.run(name), can_reset=not name.startswith("stock")
        )

    def arms(self, scenario: Scenario, reference: Reference) -> Mapping[str, Arm]:
        """Make a scenario's arms."""
        return {name: self._arm(name, reference) for name in scenario.arms if _set_of(name) in self.sets.sets}

    def beside(self) -> Mapping[str, Complete]:
        """Return, by arm, completions on the engine that decodes for it."""
        return {
            name: one_engine(self.http, self.sets.sets[_set_of(name)].urls[-1], self.served_name)
            for name in (*ROUTES, *STOCK_ARMS)
            if _set_of(name) in self.sets.sets
        }

    def _arm(self, name: str, reference: Reference) -> Arm:
        engines = self.engines(_set_of(name))
        if name in ROUTES:
            missing = prefill_cache_of(self.http, engines.urls[0]) if name == "fetch" else None
            return SessionArm(name, self.client, engines, missing)
        complete = one_engine(self.http, engines.urls[-1], self.served_name)
        return PlainArm(name, complete, reference.delta_ids, engines)


def _set_of(arm: str) -> str:
    return "ours" if arm in ROUTES else arm


def main() -> int:
    """Run the benchmark and return the exit status."""
    options = _options()
    signal.signal(signal.SIGTERM, leave_in_order)  # engines that stand still would stay so for ever
    model = ensure_smollm2(console.print)
    config = model / "config.json"
    # The engines compute in float32, whatever the weights were made in.
    kv_bytes = kv_bytes_per_token(json.loads(config.read_text("utf-8")))
    facts = Model(SMOLLM2, read_model(config).attention_tokens, kv_bytes)
    OUT.mkdir(exist_ok=True)
    folder = OUT / "bench-engines"
    folder.mkdir(exist_ok=True)

    def aggregated() -> PlainEngine:
        # A pair has a core and a cache for each engine; this one has both.
        args = ("--kv-cache-memory-bytes", str(2 * _KV_BYTES), "--max-num-batched-tokens", "512")
        return PlainEngine(str(model), SMOLLM2, log_file=folder / "aggregated.log", num_threads=len(ROLES), args=args)

    console.print("starting the engines of all arms, one set after the other")
    with EngineSets({"ours": _config(str(model), folder / "ours")}, folder, aggregated) as sets:
        results = asyncio.run(_measure(sets, facts, options))
    result = to_file(results, machine={"cores": os.cpu_count()}, versions=versions())
    _write(result)
    found = checks(result)
    for check in found:
        console.print(verdict(check), soft_wrap=True)
    return 0 if all(check.passed for check in found) else 1


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--scenario", action="append")
    return parser.parse_args()


def _config(model: str, folder: Path) -> StackConfig:
    prefill, decode = free_ports()
    return StackConfig(
        model=model,
        served_name=SMOLLM2,
        prefill=prefill,
        decode=decode,
        secret_file=ensure_secret(folder),
        kv_cache_bytes=_KV_BYTES,
        extra_env={"VLLM_SERVER_DEV_MODE": "1"},
    )


async def _measure(sets: EngineSets, model: Model, options: argparse.Namespace) -> list[ScenarioResult]:
    async with AsyncExitStack() as stack:
        limits = httpx.Limits(keepalive_expiry=1.0)  # engines close idle connections after 5 s
        http = await stack.enter_async_context(httpx.AsyncClient(trust_env=False, timeout=600, limits=limits))
        client = await stack.enter_async_context(
            AsyncBidiKV(f"{sets.sets['ours'].urls[-1]}/v1", http_client=http, model=model.name)
        )
        bench = Bench(sets, http, client, model.name)
        wanted = [one for one in (LONG_AGENT, SHORT_CHAT) if not options.scenario or one.name in options.scenario]
        return [await _run(scenario, bench, model, options) for scenario in wanted]


async def _run(scenario: Scenario, bench: Bench, model: Model, options: argparse.Namespace) -> ScenarioResult:
    return await run_scenario(
        scenario,
        lambda reference: bench.arms(scenario, reference),
        model=model,
        num_rounds=options.rounds,
        seed=options.seed,
        beside=bench.beside(),
        on_part=lambda part: _show(scenario, part),
    )


def _show(scenario: Scenario, part: ArmRound) -> None:
    later = [one.ttft_s for one in part.samples if one.turn > 1 and not one.beside]
    times = " ".join(f"{one:.2f}" for one in later)
    console.print(f"{scenario.name:11} round {part.round} {part.arm:20} {part.seconds:5.1f} s   TTFT {times}")


def _write(result: dict[str, Any]) -> None:
    (OUT / "bench.json").write_text(json.dumps(result, indent=2) + "\n", "utf-8")
    (OUT / "bench.md").write_text(to_markdown(result) + "\n", "utf-8")
    write_page(result, write_plots(result, OUT / "bench-plots"), OUT / "bench.html")
    console.print(to_markdown(result))


if __name__ == "__main__":
    sys.exit(main())
