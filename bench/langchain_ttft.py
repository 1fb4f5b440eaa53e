"""The same LangChain agent on `ChatOpenAI` and on `ChatBidiKV`: time to first token of each turn, side by side.

    python -m bench.langchain_ttft

Three arms on one pair of engines, with the demo's model and agent: `ChatOpenAI` where P computes every prompt, as stock
P and D do; `ChatBidiKV`; and `ChatOpenAI` on D without any P, where vLLM's own prefix cache has what this one agent
said, as long as nobody else needs the memory; it also has what the arms before it said. Needs `make integrations`.
Order: `main` → `run_arm` for each → `report`. Three minutes on two cores; the exit status is 1 where the arms differ.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import median
from typing import Any, Final

import httpx
from rich.console import Console

from bench.demo import show_progress, stack_config, warm_up
from bidikv_sdk import BidiKV
from server_ext.launch.model import SMOLLM2, ensure_smollm2
from server_ext.launch.stack import running_stack

ROOT: Final = Path(__file__).resolve().parents[1]
ARMS: Final = ("recomputed", "bidikv", "d-alone")
_LONG: Final = 2000

console = Console(highlight=False)


def main() -> int:
    """Run all arms and return the exit status."""
    state_dir = ROOT / "out" / "langchain-stack"
    with running_stack(stack_config(str(ensure_smollm2()), state_dir), state_dir, show_progress) as stack:
        with httpx.Client(trust_env=False) as http, BidiKV(f"{stack.url}/v1", http_client=http) as client:
            warm_up(client)
        return report({arm: run_arm(arm, f"{stack.url}/v1") for arm in ARMS})


def run_arm(arm: str, url: str) -> list[dict[str, Any]]:
    """Run the agent in LangChain's environment, and return its turns."""
    argv = [str(ROOT / ".venvs/langchain/bin/python"), "-m", "bench._langchain_agent", arm]
    env = {**os.environ, "BIDIKV_BASE_URL": url, "BIDIKV_MODEL": SMOLLM2}
    done = subprocess.run(argv, cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True, check=True)  # noqa: S603 - ours
    return [json.loads(line) for line in done.stdout.splitlines()]


def report(arms: dict[str, list[dict[str, Any]]]) -> int:
    """Print the table and return the exit status."""
    console.print(
        "turn  prompt  ChatOpenAI (P computes)  ChatBidiKV  ratio  ChatOpenAI (D alone)  said", soft_wrap=True
    )
    ratios = []
    is_same = True
    for number, (computed, ours, alone) in enumerate(zip(*(arms[arm] for arm in ARMS), strict=True), 1):
        same = len({(turn["prompt_tokens"], turn["text"]) for turn in (computed, ours, alone)}) == 1
        is_same &= same
        ratio = computed["ttft_s"] / ours["ttft_s"]
        if ours["prompt_tokens"] >= _LONG:
            ratios.append(ratio)
        console.print(
            f"{number:4}  {ours['prompt_tokens']:6}  {computed['ttft_s']:21.2f} s  {ours['ttft_s']:8.2f} s"
            f"  {ratio:5.1f}  {alone['ttft_s']:18.2f} s  {'the same' if same else 'DIFFERENT'}",
            soft_wrap=True,
        )
    console.print(f"median ratio of the turns with {_LONG} prompt tokens or more: {median(ratios):.1f}")
    return 0 if is_same else 1


if __name__ == "__main__":
    sys.exit(main())
