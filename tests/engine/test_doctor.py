"""`bidikv doctor` on real engines: a healthy stack, and one with as many faults as two starts can hold.

Also one pass of `bidikv session` and `bidikv top` on the healthy one.
"""

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from bidikv_sdk import BidiKV
from server_ext.cli._app import app
from server_ext.launch.command import StackConfig, engine_command, kv_transfer_config
from server_ext.launch.stack import Stack, ensure_secret, free_ports
from server_ext.launch.tiny import TINY, ensure_tiny

from .common import BLOCK_BYTES, MAX_MODEL_LEN, eventually
from .rig import Stacks
from .talk import words

KEY = "key-of-the-ill"
GREEDY = {"temperature": 0, "max_completion_tokens": 4}


@dataclass
class Clinic:
    """Where the engines are.

    - `healthy`: a stack as `bidikv up` starts it.
    - `ill`: D of the other one; it asks for `KEY`.
    - `stock`: an engine whose VLLM_PLUGINS was forgotten.
    """

    healthy: Stack
    ill: Stack
    stock: str


def healthy_config(folder: Path) -> StackConfig:
    """Return a small stack with bidikv's own defaults."""
    prefill, decode = free_ports()
    return StackConfig(
        model=str(ensure_tiny()),
        served_name=TINY,
        prefill=prefill,
        decode=decode,
        secret_file=ensure_secret(folder),
        kv_cache_bytes=256 * BLOCK_BYTES,
        max_model_len=MAX_MODEL_LEN,
    )


def ill_config(folder: Path, prefill_urls: list[str]) -> StackConfig:
    """Return a stack of which D is badly set, and P does not fit to it."""
    config = replace(
        healthy_config(folder),
        api_keys=(KEY,),
        fresh_prefill_salt=True,
        settings={
            "default_route": "recompute",
            "default_ttl_s": 2.0,
            "ticket_ttl_s": 4.0,
            "budget_fraction": 0.05,
        },
    )
    config = replace(config, settings={**config.settings, "prefill_urls": [config.url("prefill"), *prefill_urls]})
    transfer = kv_transfer_config(config, "prefill")
    transfer["kv_connector_extra_config"] |= {"kv_recompute_threshold": 256}
    return replace(
        config,
        extra_args={
            "decode": ("--max-num-batched-tokens", "2048", "--no-enable-prompt-tokens-details"),
            "prefill": (
                *("--block-size", "64", "--dtype", "bfloat16", "--max-model-len", "1024"),
                *("--hf-overrides", json.dumps({"rope_theta": 12345.0})),
                *("--kv-transfer-config", json.dumps(transfer)),
            ),
        },
    )


@pytest.fixture(scope="module")
def clinic(stacks: Stacks, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Clinic]:
    """Five engines; those of the suite end first."""
    stacks.stop()
    folder = tmp_path_factory.mktemp("clinic")
    healthy = Stack(healthy_config(folder / "healthy"), folder / "healthy")
    stock = healthy_config(folder / "stock")
    command = engine_command(stock, "prefill", {k: v for k, v in os.environ.items() if k != "VLLM_PLUGINS"})
    env = {name: value for name, value in command.env.items() if name != "VLLM_PLUGINS"}
    dead = free_ports()[0].http
    urls = [healthy.prefill_url, stock.url("prefill"), healthy.url, f"http://127.0.0.1:{dead}"]
    ill = Stack(ill_config(folder / "ill", urls), folder / "ill")
    with (folder / "stock.log").open("wb") as log:
        forgotten = subprocess.Popen(
            command.argv, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )
    try:
        for stack in (healthy, ill):
            stack.start()
        for stack in (healthy, ill):
            stack.wait_ready()
        eventually(lambda: is_up(stock.url("prefill")), "the engine without plugins to be up", deadline_s=300)
        yield Clinic(healthy, ill, stock.url("prefill"))
    finally:
        os.killpg(forgotten.pid, signal.SIGKILL)
        forgotten.wait()
        for stack in (healthy, ill):
            stack.stop()


def is_up(url: str) -> bool:
    """Tell whether an engine serves."""
    try:
        return httpx.get(f"{url}/health", trust_env=False).is_success
    except httpx.TransportError:
        return False


def invoke(*argv: str) -> Any:
    """Run the command line in this process."""
    return CliRunner().invoke(app, argv)


def diagnose(url: str, *argv: str) -> dict[tuple[str, str], list[str]]:
    """Return the texts of all findings, by check and status."""
    told = json.loads(invoke("doctor", "--json", "--base-url", url, *argv).stdout)
    findings: dict[tuple[str, str], list[str]] = {}
    for one in told["findings"]:
        assert one["fix"] or one["status"] == "PASS"
        findings.setdefault((one["check"], one["status"]), []).append(f"{one['text']} | {one['fix']}")
    return findings


def test_a_healthy_stack_passes(clinic: Clinic) -> None:
    """Every line is a PASS, the two turns fetch all that is held, and no session is left behind."""
    for _ in range(2):  # what the first doctor left in P's prefix cache must not stand in for the second one's fetch
        result = invoke("doctor", "--strict", "--base-url", clinic.healthy.url)
        assert result.exit_code == 0, result.stdout
        lines = result.stdout.splitlines()
        assert len(lines) == 11
        assert all(line.startswith("PASS  ") for line in lines)
        assert lines[-1].startswith("PASS  two turns: turn 2 fetched ")
    assert invoke("session", "ls", "--base-url", clinic.healthy.url).stdout == "no sessions\n"


PLANTED = [
    ("flags", "WARN", "steps of up to 2048 tokens", "--max-num-batched-tokens 256"),
    ("flags", "WARN", "cached tokens", "--enable-prompt-tokens-details"),
    ("prefill 0", "FAIL", "another model configuration", "same --model"),
    ("prefill 0", "FAIL", "bfloat16 on P, float32 on D", "same --dtype"),
    ("prefill 0", "FAIL", "64 on P, 32 on D", "same --block-size"),
    ("prefill 0", "WARN", "fewer than 256 tokens", '"kv_recompute_threshold": 0'),
    ("prefill 0", "WARN", "up to 1024 tokens", "same --max-model-len"),
    ("prefill 1", "FAIL", "another secret", "same bytes in secret_file"),
    ("prefill 2", "FAIL", "no bidikv routes", "VLLM_PLUGINS=bidikv,bidikv_http"),
    ("prefill 3", "FAIL", "is a decode engine", "role to 'prefill'"),
    ("prefill 4", "FAIL", "finds nobody there", "start it"),
    ("settings", "FAIL", "ticket_ttl_s is 4", "ticket_ttl_s to 60"),
    ("settings", "WARN", "default_ttl_s is 2", "default_ttl_s to 60"),
    ("settings", "WARN", "budget of one tenant holds 384 tokens", "raise"),
    ("settings", "WARN", "default_route is 'recompute'", "'fetch'"),
    ("settings", "WARN", "fresh_prefill_salt is on", "out"),
    # P's answer is in blocks of another size, so D does not take it.
    ("two turns", "FAIL", "prefill_unavailable", "prefill lines above"),
]


def test_what_is_planted_is_found(clinic: Clinic) -> None:
    """One run names every fault of the ill stack, and its fix; what is right passes."""
    findings = diagnose(clinic.ill.url, "--api-key", KEY)
    for check, status, text, fix in PLANTED:
        found = findings.get((check, status), [])
        assert [one for one in found if text in one.split(" | ")[0] and fix in one.split(" | ")[1]], (text, findings)
    assert {check for check, status in findings if status == "PASS"} == {
        "decode engine", "extension", "versions", "engine core", "tenants", "metrics", "sessions",
    }  # fmt: skip
    assert sum(map(len, findings.values())) == len(PLANTED) + 7


def test_wrong_addresses_and_keys_are_told_apart(clinic: Clinic) -> None:
    """P in place of D, an engine without plugins, a wrong key, and nobody at all: each is one line with its fix."""
    nobody = f"http://127.0.0.1:{free_ports()[0].http}"
    for url, argv, check, text in (
        (clinic.healthy.prefill_url, (), "extension", "is a prefill engine"),
        (clinic.stock, (), "extension", "no bidikv routes"),
        (clinic.ill.url, ("--api-key", "wrong"), "API key", "does not accept this key"),
        (clinic.ill.url, (), "API key", "does not accept this key"),
        (nobody, (), "decode engine", "nobody listens"),
    ):
        ((key, texts),) = diagnose(url, *argv).items()
        assert key == (check, "FAIL")
        assert text in texts[0]


def test_sessions_from_the_command_line(clinic: Clinic) -> None:
    """List, show, extend, release and end, and the same sessions in `top`, on real engines."""
    at = ("--base-url", clinic.healthy.url)
    with BidiKV(f"{clinic.healthy.url}/v1", model=TINY) as client:
        session = client.session("from-the-command-line", **GREEDY)
        session.send(words(80), route="local")
        report = session.send("And now?", route="fetch").cache
    (listed,) = json.loads(invoke("session", "ls", "--json", *at).stdout)["sessions"]
    assert listed["last_turn"]["fetched_tokens"] == report.fetched_tokens > 0
    shown = invoke("session", "show", session.id, *at).stdout
    assert "fetched: forced" in shown
    extended = json.loads(invoke("session", "extend", session.id, "--ttl-s", "300", "--json", *at).stdout)
    assert extended["lease"]["remaining_s"] > 290
    told = json.loads(invoke("top", "--once", "--json", *at).stdout)
    assert told["totals"]["leased_blocks"] == listed["lease"]["num_blocks"] > 0
    assert told["totals"]["fetched_tokens"] >= report.fetched_tokens
    table = invoke("top", "--once", *at).stdout
    assert "fetched: forced" in table
    assert "255 blocks" in table
    assert invoke("session", "release", session.id, *at).exit_code == 0
    assert json.loads(invoke("top", "--once", "--json", *at).stdout)["totals"]["leased_blocks"] == 0
    assert invoke("session", "end", session.id, *at).exit_code == 0
    result = invoke("session", "show", session.id, *at)
    assert (result.exit_code, "bidikv session ls" in result.stderr) == (1, True)
