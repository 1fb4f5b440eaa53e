"""Every way of serving an agent's turns, measured in one run on this machine (`make bench`, `make bench FULL=1`).

Starts all engines that the arms need, lets them take turns, writes `bench.json`, `bench.md`, plots and one HTML page,
after each scenario anew, and judges the bars. The exit status is 1 where one is missed.

Order: `main` -> `measure_all` (engines of one setup after the other) -> `measure` (one scenario) -> `write`.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import json
import os
import signal
import sys
import time
import traceback
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import httpx
from rich.console import Console

from bench._bars import checks
from bench._engine_sets import EngineSets
from bench._machine import versions
from bench._plain_engine import PlainEngine
from bench._plan import FULL_RUN, SHORT_RUN
from bench._report import report
from bench._setups import AGGREGATED, BLOCK_SIZE, HOLD_S, OURS, hold_s, set_of
from bench._show import verdict
from bench._stock import Handles, StockProxy
from bench._stock_arm import StockCompletions, StockEngines
from bench.faults import leave_in_order
from bidikv_sdk import AsyncBidiKV
from server_ext.analysis.hardware import read_model
from server_ext.benchmark.arms import ROUTES, PlainArm, SessionArm, one_engine
from server_ext.benchmark.engines import RunningEngines, prefill_cache_of
from server_ext.benchmark.limits import kv_bytes_per_token
from server_ext.benchmark.page import to_html, write_plots
from server_ext.benchmark.rounds import Company
from server_ext.benchmark.suite import Model, run_scenario, to_file
from server_ext.launch.model import SMOLLM2, ensure_smollm2
from server_ext.launch.tiny import TINY, ensure_tiny

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from bench._plan import Part
    from bench._result import Check
    from bench._setups import Setup
    from server_ext.benchmark.arms import Arm
    from server_ext.benchmark.rounds import ArmRound, Reference
    from server_ext.benchmark.scenarios import Scenario
    from server_ext.benchmark.summary import ScenarioResult

ROOT: Final = Path(__file__).resolve().parents[1]
_MODELS: Final = {SMOLLM2: ensure_smollm2, TINY: ensure_tiny}

console = Console(highlight=False)


class OtherMachine(Exception):
    """The file to merge into was measured elsewhere; the text says what differs."""


@dataclass(frozen=True)
class Bench:
    """What the arms on one setup's engines are made of."""

    sets: EngineSets
    http: httpx.AsyncClient
    client: AsyncBidiKV
    model: Model
    stock: dict[str, StockProxy]
    _engines: dict[str, RunningEngines] = field(default_factory=dict)

    def arms(self, scenario: Scenario, reference: Reference) -> Mapping[str, Arm]:
        """Make a scenario's arms."""
        return {name: self._arm(name, scenario, reference) for name in scenario.arms}

    def company(self, scenario: Scenario) -> Company:
        """Return who serves what a scenario asks besides."""
        decode = {name: one_engine(self.http, self._urls(name)[-1], self.model.name) for name in scenario.arms}
        prefill = {name: one_engine(self.http, self._urls(name)[0], self.model.name) for name in scenario.arms}
        return Company(decode, prefill)

    def _urls(self, arm: str) -> Sequence[str]:
        return self.sets.sets[set_of(arm)].urls

    def _running(self, name: str) -> RunningEngines:
        """Return a set's engines; the same object each time, for arms that share them."""
        if name not in self._engines:
            self._engines[name] = RunningEngines(
                self.http,
                self.sets.sets[name].urls,
                lambda: self.sets.run(name),
                can_reset=name not in HOLD_S,  # no engine empties its cache while it holds blocks for another
            )
        return self._engines[name]

    def _arm(self, name: str, scenario: Scenario, reference: Reference) -> Arm:
        engines = self._running(set_of(name))
        # Where other sessions fill P's cache, nobody else empties it.
        is_emptied = not scenario.num_crowd
        if name in ROUTES:
            missing = prefill_cache_of(self.http, engines.urls[0]) if name == "fetch" and is_emptied else None
            return SessionArm(name, self.client, engines, missing)
        if name in HOLD_S:
            stock = StockCompletions(self.stock[name], is_emptied)
            pinned = StockEngines(engines, self.stock[name], BLOCK_SIZE * self.model.kv_bytes_per_token)
            give_back = functools.partial(pinned.give_back, stock)
            return PlainArm(name, stock.complete, reference.continuation, pinned, give_back)
        complete = one_engine(self.http, engines.urls[-1], self.model.name)
        return PlainArm(name, complete, reference.continuation, engines)


def main() -> int:
    """Run the benchmark and return the exit status."""
    options = _options()
    signal.signal(signal.SIGTERM, leave_in_order)  # engines that stand still would stay so for ever
    plan = FULL_RUN if options.full else SHORT_RUN
    parts = [one for one in plan if _is_wanted(one, options.scenario)]
    if options.rounds is not None:
        parts = [replace(one, rounds=options.rounds) for one in parts]
    installed = versions()
    machine = {"cores": os.cpu_count(), "cpu": installed.pop("cpu")}
    out = Path(options.out)
    content = to_file([], machine=machine, versions=installed)
    content["run"] = "full" if options.full else "short"
    if options.merge:
        before = _scenarios_of(out / "bench.json", content)
        again = {one.scenario.name for one in parts}
        content["scenarios"] = {name: one for name, one in before.items() if name not in again}
    # What pieces are put together into is judged as the whole.
    wanted = [one.scenario.name for one in (plan if options.merge else parts)]
    started_s = time.monotonic()
    for setup, of_setup in groupby(parts, key=lambda one: one.setup):
        _try_all(setup, list(of_setup), content, out, options.seed)
    console.print(f"measured for {(time.monotonic() - started_s) / 60:.1f} minutes; all is in {out}")
    found = checks(content, wanted)
    write(content, found, out)
    for check in found:
        console.print(verdict(check), soft_wrap=True)
    return 0 if all(check.passed for check in found) else 1


def _try_all(setup: Setup, parts: Sequence[Part], content: dict[str, Any], out: Path, seed: int) -> None:
    """Measure one setup's scenarios; where that fails, say so, and leave the others their hour."""
    try:
        measure_all(setup, parts, content, out, seed)
    except Exception:  # noqa: BLE001 (whatever it was)
        console.print(f"{setup.name} ended early", traceback.format_exc(), sep="\n")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    names = sorted({one.scenario.name for one in (*SHORT_RUN, *FULL_RUN)})
    parser.add_argument("--full", action="store_true", help="all scenarios, with 6,000 tokens and 99th percentiles")
    parser.add_argument("--scenario", action="append", choices=names, help="only this one; may be given several times")
    parser.add_argument("--merge", action="store_true", help="keep the other scenarios of the file that is there")
    parser.add_argument("--rounds", type=int, help="how often each arm runs (default: as planned)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", default=str(ROOT / "out"), help="folder of the results")
    options = parser.parse_args()
    unknown = set(options.scenario or ()) - {one.scenario.name for one in (FULL_RUN if options.full else SHORT_RUN)}
    if unknown:
        parser.error(f"{', '.join(sorted(unknown))}: of the full run only; give --full")
    return options


def _is_wanted(part: Part, names: Sequence[str] | None) -> bool:
    return not names or part.scenario.name in names


def _scenarios_of(path: Path, content: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a file says of scenarios, if it was measured on this machine, with these versions, by this plan.

    Raises:
        OtherMachine: it was not.
    """
    if not path.exists():
        return {}
    found = json.loads(path.read_text("utf-8"))
    for name in ("machine", "versions", "run"):
        if found.get(name) != content[name]:
            msg = f"{path} has {name} {found.get(name)}, this is {content[name]}: run without --merge"
            raise OtherMachine(msg)
    scenarios: dict[str, Any] = found["scenarios"]
    return scenarios


def measure_all(setup: Setup, parts: Sequence[Part], content: dict[str, Any], out: Path, seed: int) -> None:
    """Start one setup's engines, measure its scenarios, and write the results after each.

    Args:
        setup: the engines.
        parts: the scenarios.
        content: of `bench.json`; results are put into it.
        out: folder of the results.
        seed: of conversations and orders.
    """
    folder = ROOT / "out" / "bench-engines" / setup.name
    folder.mkdir(parents=True, exist_ok=True)
    path = _MODELS[setup.model](console.print)
    config = path / "config.json"
    # The engines compute in float32, whatever the weights were made in.
    token_bytes = kv_bytes_per_token(json.loads(config.read_text("utf-8")))
    model = Model(setup.model, read_model(config).attention_tokens, token_bytes)
    wanted = {set_of(arm) for one in parts for arm in one.scenario.arms}

    def aggregated() -> PlainEngine:
        return PlainEngine(
            str(path),
            setup.model,
            log_file=folder / "aggregated.log",
            args=setup.aggregated_args(token_bytes),
        )

    console.print(f"{setup.name}: starting {len(wanted)} sets of engines, one after the other")
    configs = {name: one for name, one in setup.pair_configs(path, token_bytes, folder).items() if name in wanted}
    with EngineSets(configs, folder, aggregated if AGGREGATED in wanted else None) as sets:
        asyncio.run(_measure_parts(sets, model, parts, content, out, seed))


async def _measure_parts(
    sets: EngineSets, model: Model, parts: Sequence[Part], content: dict[str, Any], out: Path, seed: int
) -> None:
    async with AsyncExitStack() as stack:
        limits = httpx.Limits(keepalive_expiry=1.0)  # engines close idle connections after 5 s

        async def client_of(url: str = "") -> httpx.AsyncClient:
            client = httpx.AsyncClient(base_url=url, trust_env=False, timeout=600, limits=limits)
            return await stack.enter_async_context(client)

        stock = {}
        for name in HOLD_S:
            if name in sets.sets:
                prefill, decode = [await client_of(url) for url in sets.sets[name].urls]
                handles = Handles(hold_s(name), block_size=BLOCK_SIZE)
                stock[name] = StockProxy(prefill, decode, model.name, handles)
        http = await client_of()
        client = AsyncBidiKV(f"{sets.sets[OURS].urls[-1]}/v1", http_client=http, model=model.name)
        await stack.enter_async_context(client)
        bench = Bench(sets, http, client, model, stock)
        for part in parts:
            result = await _measure(part, bench, seed)
            setup = part.setup.to_json()
            content["scenarios"][part.scenario.name] = {**result.to_json(), "seed": seed, "engines": setup}
            write(content, checks(content), out)
            _write_samples(result)


async def _measure(part: Part, bench: Bench, seed: int) -> ScenarioResult:
    scenario = part.scenario
    return await run_scenario(
        scenario,
        lambda reference: bench.arms(scenario, reference),
        model=bench.model,
        num_rounds=part.rounds,
        seed=seed,
        company=bench.company(scenario),
        on_part=lambda one: _show(scenario, one),
        max_seconds=None if part.max_minutes is None else 60 * part.max_minutes,
    )


def _show(scenario: Scenario, part: ArmRound) -> None:
    later = [one.ttft_s for one in part.samples if one.turn > 1 and one.is_measured and not one.beside]
    times = " ".join(f"{one:.2f}" for one in later[:12])
    console.print(f"{scenario.name:16} round {part.round} {part.arm:26} {part.seconds:6.1f} s   TTFT {times}")


def _write_samples(result: ScenarioResult) -> None:
    """Keep every turn, for whoever wants to look behind a number; these files are not published."""
    folder = ROOT / "out" / "bench-samples"
    folder.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(one.to_json()) for one in result.samples]
    (folder / f"{result.scenario.name}.jsonl").write_text("\n".join(lines) + "\n", "utf-8")


def write(content: Mapping[str, Any], found: Sequence[Check], out: Path) -> None:
    """Write the results so far, with their bars."""
    out.mkdir(parents=True, exist_ok=True)
    (out / "bench.json").write_text(json.dumps(content, indent=1) + "\n", "utf-8")
    (out / "bench.md").write_text(report(content, found), "utf-8")
    (out / "bench.html").write_text(to_html(content, write_plots(content, out / "plots")), "utf-8")


if __name__ == "__main__":
    sys.exit(main())
