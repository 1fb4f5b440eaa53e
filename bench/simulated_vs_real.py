"""The simulator against two real engines: the same sessions, the same seed, and rates measured around them.

It starts one P and one D with SmolLM2, measures their rates as `bidikv rates` does, replays planned sessions on them
several at a time, measures the rates again, simulates the same plan with the rates that explain both measurements, and
prints both sides. Nothing of the replay goes into the rates; they are measured on either side of it because a machine
with noisy neighbours is not the same half an hour later. P's own prefix cache never hits here, so that turns fetch all
of their history; the pool is small and leases live shorter than some gaps, so that turns also lose it.

    python -m bench.simulated_vs_real [--seeds 1] [--json out/simulated_vs_real.json] [--add]
    python -m bench.simulated_vs_real --again --json docs/simulate.json  # what was replayed, simulated again
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import httpx
import numpy as np
from rich.console import Console

from bench._cores import ONE_THREAD
from bench._machine import versions
from bidikv_sdk import AsyncBidiKV
from server_ext.analysis.memory import make_settings
from server_ext.cli._measure import Measurement, say, words
from server_ext.launch.command import CPU_STEP_TOKENS, StackConfig
from server_ext.launch.model import SMOLLM2, ensure_smollm2
from server_ext.launch.stack import ensure_secret, free_ports, running_stack
from server_ext.simulation.config import FleetConfig
from server_ext.simulation.fit import BesideSample, DecodeSample, Shape, TurnSample, fit_rates
from server_ext.simulation.fleet import Fleet
from server_ext.traffic import SMALL, LogNormal, PlannedSession, generate, prompts

if TYPE_CHECKING:
    from server_ext.simulation.rates import FleetRates
    from server_ext.simulation.results import Results

OUT: Final = Path(__file__).resolve().parents[1] / "out"
TTL_S: Final = 6.0
MAX_GAP_S: Final = 20.0
MIN_DELTA_TOKENS: Final = 40
LONGEST_TOKENS: Final = 2000
CONTEXT_TOKENS: Final = 4096
BLOCK_TOKENS: Final = 32
# Room for a dozen sessions or so, and for four under leases: budgets clip some, requests take what others left.
KV_CACHE_BYTES: Final = 512 << 20
BUDGET: Final = 0.5
# Shorter than `SMALL`, for a plan must end within minutes on one core for each engine.
WORKLOAD: Final = replace(
    SMALL,
    num_turns=LogNormal(8, 0.4),
    max_turns=12,
    system_tokens=100,
    first=LogNormal(400, 0.4),
    output=LogNormal(6, 0.5),
    compaction_share=0,
    early_edit_share=0,
    late_edit_share=0,
    max_context_tokens=3_000,
)

console = Console(highlight=False)


@dataclass(frozen=True, slots=True)
class Row:
    """A turn on real engines."""

    turn: int
    outcome: str
    reason: str
    prompt_tokens: int
    planned_tokens: int
    ttft_s: float
    token_s: float


def main() -> int:
    """Run everything and return the exit status: 1 where the two sides are too far apart."""
    args = arguments()
    path = Path(args.json)
    runs = json.loads(path.read_text("utf-8"))["runs"] if args.add or args.again else []
    if not args.again:
        runs += on_engines(args)
    results = [judged(run) for run in runs]
    report = {
        "versions": versions(),
        "ttl_s": TTL_S,
        "budget_fraction": BUDGET,
        "workload": asdict(WORKLOAD),
        "runs": results,
    }
    path.parent.mkdir(exist_ok=True, parents=True)
    path.write_text(json.dumps(report, indent=1) + "\n", "utf-8")
    for run in results:
        console.print(markdown(run))
    console.print(f"all numbers: {path}")
    return 0 if all(run["is_close"] for run in results) else 1


def on_engines(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Return what real engines took: a record for each seed."""
    state_dir = OUT / "simulated-stack"
    model = str(ensure_smollm2(console.print))
    prefill, decode = free_ports()
    config = StackConfig(
        model=model,
        served_name=SMOLLM2,
        prefill=prefill,
        decode=decode,
        secret_file=ensure_secret(state_dir),
        fresh_prefill_salt=True,
        max_model_len=CONTEXT_TOKENS,
        kv_cache_bytes=KV_CACHE_BYTES,
        settings={"default_ttl_s": TTL_S, "budget_fraction": BUDGET, "default_route": "fetch"},
        extra_env=ONE_THREAD,
    )
    with running_stack(
        config, state_dir, lambda p: console.print(f"{p.elapsed_s:5.0f} s  {p.role:8} {p.stage}")
    ) as stack:
        return asyncio.run(measure(stack.url, args))


def arguments() -> argparse.Namespace:
    """Return the command line's options."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--seeds", default="1", help="one plan each, such as 1,2")
    parser.add_argument("--sessions", type=int, default=20, help="of a plan")
    parser.add_argument("--load", type=float, default=0.45, help="share of the time that the engines compute, about")
    parser.add_argument("--add", action="store_true", help="keep the runs that the file has")
    parser.add_argument("--again", action="store_true", help="only simulate the file's runs, without engines")
    parser.add_argument("--json", default=str(OUT / "simulated_vs_real.json"))
    return parser.parse_args()


async def measure(url: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Replay a plan for each seed, and measure the rates before the first and after each."""
    async with (
        httpx.AsyncClient(trust_env=False, timeout=600) as http_client,
        AsyncBidiKV(f"{url}/v1", http_client=http_client) as client,
    ):
        samples, pool_tokens = await measurement(client)
        overheads = await overhead(client)
        records = []
        for seed in map(int, args.seeds.split(",")):
            rate_per_s = pace(seed, args.load, fitted(pool_tokens, [samples]))
            plan = planned(seed, args.sessions, rate_per_s)
            num_turns = sum(len(session.turns) for session in plan)
            console.print(f"seed {seed}: {len(plan)} sessions, {num_turns} turns")
            started_s = time.perf_counter()
            rows = await replay(client, plan, overheads)
            took_s = time.perf_counter() - started_s
            before, (samples, _) = samples, await measurement(client)
            records.append(
                {
                    "seed": seed,
                    "num_sessions": len(plan),
                    "rate_per_s": rate_per_s,
                    "took_s": took_s,
                    "pool_tokens": pool_tokens,
                    "samples": [before, samples],
                    "turns": [asdict(row) for row in rows],
                }
            )
    return records


async def measurement(client: AsyncBidiKV) -> tuple[dict[str, Any], int]:
    """Return what `bidikv rates` measures on idle engines, and the tokens of D's pool."""
    measured = Measurement(client, LONGEST_TOKENS, 1, lambda text: console.print(f"rates: {text}"))
    await measured.run()
    return measured.raw(), measured.said[-1].pool.total_blocks * measured.block_size


def fitted(pool_tokens: int, samples: list[dict[str, Any]]) -> FleetRates:
    """Return the rates that explain all samples of some measurements of the same engines."""
    shape = Shape(
        model="smollm2-135m",
        source=f"measured with prompts of up to {LONGEST_TOKENS} tokens",
        kv_bytes_per_token=KV_CACHE_BYTES // pool_tokens,
        max_context_tokens=CONTEXT_TOKENS,
        pool_tokens=pool_tokens,
        step_tokens=CPU_STEP_TOKENS["decode"],
        prefill_step_tokens=CPU_STEP_TOKENS["prefill"],
    )
    return fit_rates(
        shape,
        [TurnSample(**one) for part in samples for one in part["turns"]],
        [DecodeSample(**one) for part in samples for one in part["decodes"]],
        [BesideSample(**{**one, "turn": TurnSample(**one["turn"])}) for part in samples for one in part["besides"]],
    )


async def overhead(client: AsyncBidiKV) -> tuple[int, int]:
    """Return how many tokens a first and a later turn have beside their words."""
    async with client.session() as session:
        first = await say(session, words(100), num_tokens=4, route="local")
        later = await say(session, words(100), num_tokens=4, route="local")
    grown = later.cache.prompt_tokens - first.cache.prompt_tokens - 4
    return first.cache.prompt_tokens - 100, grown - 100


def pace(seed: int, load: float, rates: FleetRates) -> float:
    """Return how many sessions begin each second, so that the engines compute for this share of the time, about.

    In an overload both sides would only tell how long the plan is. Where the two share a machine, what either computes
    counts. Leases that are lost add to it.
    """
    sample = list(generate(WORKLOAD, 100, seed=seed + 1000, rate_per_s=None))
    busy_s = sum(
        rates.prefill_s(prompt, kept) + (turn.output_tokens * rates.decode_step_s if rates.shares_machines else 0.0)
        for session in sample
        for turn, (prompt, kept) in zip(session.turns, prompts(session), strict=True)
    )
    return load / (busy_s / len(sample))


def planned(seed: int, num_sessions: int, rate_per_s: float) -> list[PlannedSession]:
    """Return the sessions of a seed, with gaps that end within minutes and deltas that a chat template can have."""
    plan = []
    for session in generate(WORKLOAD, num_sessions, seed=seed, rate_per_s=rate_per_s):
        limited = tuple(
            replace(
                turn,
                gap_s=min(turn.gap_s, MAX_GAP_S),
                delta_tokens=max(turn.delta_tokens, MIN_DELTA_TOKENS),
                output_tokens=max(turn.output_tokens, 4),
                kept_tokens=None,  # sessions only append here, also beyond the length at which others compact
            )
            for turn in session.turns
        )
        plan.append(PlannedSession(session.start_s, limited))
    return plan


async def replay(client: AsyncBidiKV, plan: list[PlannedSession], overheads: tuple[int, int]) -> list[Row]:
    """Run the sessions on the engines, each beginning when planned, and return their turns as they end."""
    rows: list[Row] = []

    async def run(session: PlannedSession) -> None:
        await asyncio.sleep(session.start_s)
        # Not ended: as in the simulation, a lease runs out by itself.
        live = client.session()
        history = 0
        for number, turn in enumerate(session.turns, 1):
            await asyncio.sleep(turn.gap_s)
            num_words = max(1, turn.delta_tokens - overheads[number > 1])
            said = await say(live, words(num_words), num_tokens=turn.output_tokens, route=None)
            cache = said.cache
            expected = history + turn.delta_tokens
            history = expected + turn.output_tokens
            rows.append(
                Row(
                    number,
                    cache.outcome,
                    cache.reason,
                    cache.prompt_tokens,
                    expected,
                    cache.timings_s.ttft or float("nan"),
                    said.token_s,
                )
            )
            console.print(
                f"  turn {number:2} {cache.outcome:10} {cache.reason:14} {cache.prompt_tokens:5} of {expected:5} "
                f"{rows[-1].ttft_s:7.3f} s"
            )

    await asyncio.gather(*(run(session) for session in plan))
    return rows


def simulated(rates: FleetRates, plan: list[PlannedSession]) -> Results:
    """Simulate the plan."""
    fleet = Fleet(
        FleetConfig(
            num_prefill=1,
            num_decode=1,
            rates=rates,
            settings=make_settings(BUDGET, TTL_S),
            route="fetch",
            has_prefill_cache=False,
            chunk_tokens=BLOCK_TOKENS,
        )
    )
    return fleet.run(iter(plan)).results()


def judged(record: dict[str, Any]) -> dict[str, Any]:
    """Return a record with its simulation, and whether the two are close.

    That is 15 % in p50 and p95 of later turns, and 3 points in what became of them: outcomes, and also reasons, for all
    turns of a pair whose P never has anything are fetched.
    """
    rates = fitted(record["pool_tokens"], record["samples"])
    sim = simulated(rates, planned(record["seed"], record["num_sessions"], record["rate_per_s"]))
    rows = [Row(**turn) for turn in record["turns"]]
    real: dict[str, Any] = {}
    for name, chosen in (("first", [r for r in rows if r.turn == 1]), ("later", [r for r in rows if r.turn > 1])):
        seconds = [row.ttft_s for row in chosen]
        real[f"{name}_ttft_s"] = {
            p: float(np.quantile(seconds, q)) for p, q in (("p50", 0.5), ("p95", 0.95), ("p99", 0.99))
        }
    later = [row for row in rows if row.turn > 1]
    real["outcomes"] = {name: share(later, "outcome", name) for name in sorted({row.outcome for row in later})}
    real["reasons"] = {name: share(later, "reason", name) for name in sorted({row.reason for row in later})}
    real["token_s"] = {"p50": float(np.median([row.token_s for row in rows]))}
    assert sim.later_ttft_s is not None  # noqa: S101 (there are such turns)
    errors = {p: float(sim.later_ttft_s[p] / real["later_ttft_s"][p] - 1) for p in ("p50", "p95")}
    points = {
        kind: 100 * max(abs(real[kind].get(name, 0.0) - shares.get(name, 0.0)) for name in {*real[kind], *shares})
        for kind, shares in (("outcomes", sim.outcomes), ("reasons", sim.reasons))
    }
    return record | {
        "rates": rates.to_json(),
        "real": real,
        "simulated": sim.to_json(),
        "errors": errors,
        "points": points,
        "is_close": all(abs(one) <= 0.15 for one in errors.values()) and all(one <= 3 for one in points.values()),
    }


def share(rows: list[Row], name: str, value: str) -> float:
    """Return the part of the rows that have this value."""
    return sum(1 for row in rows if getattr(row, name) == value) / len(rows)


def markdown(run: dict[str, Any]) -> str:
    """Return both sides as a table."""
    real, sim = run["real"], run["simulated"]
    lines = [
        f"seed {run['seed']}: {run['num_sessions']} sessions, {len(run['turns'])} turns",
        "",
        "| | real | simulated | |",
        "|---|---|---|---|",
    ]
    for name, key in (("first turns", "first_ttft_s"), ("later turns", "later_ttft_s")):
        for p in ("p50", "p95"):
            a, b = real[key][p], sim[key][p]
            lines.append(f"| TTFT of {name}, {p} | {a:.3f} s | {b:.3f} s | {b / a - 1:+.1%} |")
    a, b = real["token_s"]["p50"], sim["token_s"]["p50"]
    lines.append(f"| per token of the answer, p50 | {a * 1e3:.1f} ms | {b * 1e3:.1f} ms | {b / a - 1:+.1%} |")
    for kind in ("outcomes", "reasons"):
        for name in sorted({*real[kind], *sim[kind]}):
            a, b = real[kind].get(name, 0.0), sim[kind].get(name, 0.0)
            lines.append(f"| {name} | {a:.1%} | {b:.1%} | {100 * (b - a):+.1f} points |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
