"""The demo: one agent on two engines of this machine, with its history fetched, and with all of it computed again.

It starts the engines, warms them up, runs the agent twice, compares both runs token by token, writes `out/demo.json`,
and ends the engines, also on Ctrl-C and SIGTERM. The exit status is 1 where a check fails.

Order: `main` -> `measure` (`warm_up`, then `run_arm` for each way) -> `report`. About seven minutes on two cores.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

import httpx
from rich.console import Console

from bench._machine import cpu_cores, versions
from bench._result import Result
from bench._show import HEADER, comparison, row, verdict
from bench._turns import Recorder
from bidikv_sdk import BidiKV, BidiKVError
from examples.agents.coding_agent import CHAT, GUIDELINES, run
from server_ext.analysis.hardware import read_model
from server_ext.launch.command import ROLES, StackConfig
from server_ext.launch.model import SMOLLM2, ModelError, ensure_smollm2
from server_ext.launch.stack import StackError, ensure_secret, free_ports, running_stack

if TYPE_CHECKING:
    from bench._turns import MeasuredTurn
    from bidikv_sdk import Session
    from server_ext.launch.stack import Progress, Stack

OUT: Final = Path(__file__).resolve().parents[1] / "out"
_IDLE_S: Final = 20.0
_WARM_UP_CHARS: Final = 2000
_SHORT_PREFILLS: Final = 5

console = Console(highlight=False)


def main() -> int:
    """Run the demo and return the exit status."""
    state_dir = OUT / "demo-stack"
    try:
        model = ensure_smollm2(console.print)
        console.print(f"starting a prefill and a decode engine with {SMOLLM2} (a good minute on two cores)")
        with running_stack(stack_config(str(model), state_dir), state_dir, show_progress) as stack:
            result = measure(stack)
    except (ModelError, StackError, BidiKVError) as error:
        console.print(f"demo: {error}\nthe engines' logs are in {state_dir}", style="red", markup=False)
        return 1
    except KeyboardInterrupt:
        console.print("demo: interrupted; the engines are stopped")
        return 130
    return report(result)


def stack_config(model: str, state_dir: Path) -> StackConfig:
    """Return two engines on this machine's CPU, where P's own prefix cache is on, but never hits.

    Without that both arms would mostly measure P's cache, for there is one agent only, and one P that served it
    before. In production another P serves the next turn, or the cache was filled by other agents meanwhile.
    """
    prefill, decode = free_ports()
    return StackConfig(
        model=model,
        served_name=SMOLLM2,
        prefill=prefill,
        decode=decode,
        secret_file=ensure_secret(state_dir),
        fresh_prefill_salt=True,
    )


def measure(stack: Stack) -> Result:
    """Run both arms on engines that are ready."""
    # No proxy of the environment may stand between us and our own machine.
    with httpx.Client(trust_env=False) as http_client, BidiKV(f"{stack.url}/v1", http_client=http_client) as client:
        short_prefills = warm_up(client)
        print_head("The agent's turns, history fetched from the decode engine")
        with client.session(system=GUIDELINES, route="fetch", **CHAT) as session:
            turns = run_arm(session)
            with console.status(f"watching the idle engines for {_IDLE_S:.0f} s"):
                pids = [stack.child(role).pid for role in ROLES]
                idle_cpu_cores = cpu_cores(pids, _IDLE_S)
            idle_lease_state = session.status().lease.state
        print_head("The same turns, everything computed again")
        with client.session(system=GUIDELINES, route="recompute", **CHAT) as session:
            turns_without_reuse = run_arm(session)
    return Result(
        turns=turns,
        turns_without_reuse=turns_without_reuse,
        idle_cpu_cores=idle_cpu_cores,
        idle_lease_state=idle_lease_state,
        versions=versions(),
        short_prefills=short_prefills,
        attention_tokens=read_model(Path(stack.config.model) / "config.json").attention_tokens,
    )


def warm_up(client: BidiKV) -> list[tuple[int, float]]:
    """Have each engine read from the other once, and return tokens and seconds of some short prefills.

    The first transfer between two engines connects them, which takes far longer than any later one. It happens once
    in the life of the pair, and belongs into neither arm.
    """
    with (
        console.status("warming up: first transfer in either direction"),
        client.session(system=GUIDELINES[:_WARM_UP_CHARS], route="fetch", **CHAT) as session,
    ):
        session.send("Hello!")
        session.send("And again.")
    points = []
    for _ in range(_SHORT_PREFILLS):
        with client.session(route="recompute", **CHAT) as session:
            cache = session.send("Hello!").cache
            points.append((cache.prompt_tokens, cache.timings_s.prefill or 0.0))
    return points


def run_arm(session: Session) -> list[MeasuredTurn]:
    """Run the agent, print each turn as it ends, and return them all."""
    recorder = Recorder(lambda turn: console.print(row(turn), soft_wrap=True))
    with console.status("the agent works"):
        for _ in run(session, recorder.ask):
            pass
    return recorder.turns


def report(result: Result) -> int:
    """Write the file, print the comparison and the checks, and return the exit status."""
    OUT.mkdir(exist_ok=True)
    path = OUT / "demo.json"
    path.write_text(json.dumps(result.to_json(), indent=2) + "\n", "utf-8")
    console.print()
    console.print(comparison(result))
    checks = result.checks()
    for check in checks:
        console.print(verdict(check), soft_wrap=True)
    console.print(f"all numbers: {path}")
    return 0 if all(check.passed for check in checks) else 1


def print_head(title: str) -> None:
    """Print what stands above the rows of an arm."""
    console.print(f"\n{title}", style="bold")
    console.print(HEADER, soft_wrap=True)


def show_progress(progress: Progress) -> None:
    """Print one step of the engines' start."""
    console.print(f"{progress.elapsed_s:5.0f} s  {progress.role:8} {progress.stage}")


if __name__ == "__main__":
    sys.exit(main())
