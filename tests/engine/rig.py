"""Real stacks, one at a time: `Stacks.get` starts the one that a test names and ends the one before.

`Rig` is a running stack with what tests ask of its engines. `recomputed` is the judge of all answers: the same tokens
asked of stock vLLM on P, with nothing cached.
"""

from __future__ import annotations

import json
import secrets
import signal
import uuid
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import httpx

from server_ext.launch.command import ROLES, Role, StackConfig, kv_transfer_config
from server_ext.launch.stack import Stack, ensure_secret, free_ports
from server_ext.launch.tiny import TINY, ensure_tiny

from .brakes import BrakeFolder
from .common import (
    BLOCK_BYTES,
    BLOCK_SIZE,
    DEADLINE_S,
    MAX_MODEL_LEN,
    POOL_BLOCKS,
    PREFILL_LEASE_S,
    PREFILL_STEP_TOKENS,
    total,
)
from .copies import Copies
from .talk import Talk

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path


@dataclass
class Plan:
    """What tells one stack of this suite from another."""

    settings: dict[str, Any]
    api_keys: tuple[str, ...] = ()
    gated: bool = False
    max_model_len: int = MAX_MODEL_LEN
    pool_blocks: int = POOL_BLOCKS
    prefill_pool_blocks: int | None = None
    prefill_step_tokens: int = PREFILL_STEP_TOKENS
    braked: bool = False
    copied: bool = False
    block_size: int = BLOCK_SIZE
    fresh_prefill_salt: bool = True
    env: Mapping[str, str] = field(default_factory=dict)

    def kv_cache_bytes(self, num_blocks: int) -> int:
        """Return the memory of so many blocks, and of vLLM's null block."""
        return (num_blocks + 1) * BLOCK_BYTES * self.block_size // BLOCK_SIZE

    def prefill_args(self) -> tuple[str, ...]:
        """Return vLLM's arguments that P alone gets."""
        args: tuple[str, ...] = ("--long-prefill-token-threshold", str(self.prefill_step_tokens))
        if self.braked:
            # The threshold counts only beside other requests; this is for a prompt that is alone as well.
            args += ("--max-num-batched-tokens", "32", "--max-num-seqs", "8")
        if self.prefill_pool_blocks is not None:
            args += ("--kv-cache-memory-bytes", str(self.kv_cache_bytes(self.prefill_pool_blocks)))
        return args

    def connector(self) -> dict[str, str]:
        """Return which connector stands in the place of bidikv's own, if any."""
        if self.braked:
            return {"kv_connector": "BrakedConnector", "kv_connector_module_path": "tests.engine.braked"}
        if self.copied:
            return {"kv_connector": "CopyingConnector", "kv_connector_module_path": "tests.engine.copying"}
        return {}


class Stacks:
    """Starts what is asked for, and keeps it until something else is."""

    def __init__(self, folder: Path, plans: Mapping[str, Plan]) -> None:
        self._folder = folder
        self._plans = plans
        self._name = ""
        self._running: Rig | None = None

    def get(self, name: str) -> Rig:
        """Return the named stack, ready and whole."""
        if self._name != name:
            self.stop()
            self._name = name
            self._running = Rig.start(self._folder / name, self._plans[name])
        # One that did not start fails its first test with the reason; trying again for each would take hours.
        assert self._running is not None, f"stack {name} did not start; see the first test that needed it"
        return self._running

    def stop(self) -> None:
        """End what runs."""
        if self._running is not None:
            self._running.close()
        self._running, self._name = None, ""


class Rig:
    """One running stack, and clients of its engines."""

    def __init__(
        self, stack: Stack, plan: Plan, secret: bytes, gate_port: int, brakes: BrakeFolder, copies: Copies
    ) -> None:
        self.stack = stack
        self.secret = secret
        self.api_keys = plan.api_keys
        self.pool_blocks = plan.pool_blocks
        self.prefill_pool_blocks = plan.prefill_pool_blocks or plan.pool_blocks
        self.max_model_len = plan.max_model_len
        self.gate_port = gate_port
        self.brakes = brakes
        self.copies = copies
        self.decode, self.prefill = (
            # The engines close idle connections after 5 s: one that is about to be closed must not be used.
            httpx.Client(base_url=url, timeout=DEADLINE_S, trust_env=False, limits=httpx.Limits(keepalive_expiry=1.0))
            for url in (stack.url, stack.prefill_url)
        )
        self.threads = ThreadPoolExecutor(8)
        self.stopped: set[Role] = set()
        self.dead: set[Role] = set()

    @classmethod
    def start(cls, folder: Path, plan: Plan) -> Rig:
        """Start both engines and wait until they answer."""
        prefill, decode = free_ports()
        gate_port = free_ports()[0].http
        secret_file = ensure_secret(folder)
        brakes, copies = BrakeFolder(folder / "brakes"), Copies(folder / "copies")
        # What `auto` takes depends on how fast things are; these tests say what they want.
        settings = {"default_route": "fetch", **plan.settings}
        if plan.gated:
            # Nobody listens at the gate unless a test does; then D goes on to P itself.
            urls = [f"http://127.0.0.1:{port}" for port in (gate_port, prefill.http)]
            settings["prefill_urls"] = urls
        extra_args: dict[Role, tuple[str, ...]] = {"prefill": plan.prefill_args(), "decode": ()}
        config = StackConfig(
            model=str(ensure_tiny()),
            served_name=TINY,
            prefill=prefill,
            decode=decode,
            secret_file=secret_file,
            kv_cache_bytes=plan.kv_cache_bytes(plan.pool_blocks),
            block_size=plan.block_size,
            max_model_len=plan.max_model_len,
            tool_call_parser="hermes",
            api_keys=plan.api_keys,
            fresh_prefill_salt=plan.fresh_prefill_salt,
            settings=settings,
            extra_env={
                "VLLM_SERVER_DEV_MODE": "1",
                "BIDIKV_BRAKES": str(brakes.path),
                "BIDIKV_COPIES": str(copies.path),
                **plan.env,
            },
        )
        for role in ROLES:
            transfer = kv_transfer_config(config, role)
            # What D never comes for: P keeps it for half a minute by default.
            transfer["kv_connector_extra_config"]["kv_lease_duration"] = PREFILL_LEASE_S
            transfer |= plan.connector()
            extra_args[role] += ("--kv-transfer-config", json.dumps(transfer))
        config = replace(config, extra_args=extra_args)
        stack = Stack(config, folder)
        try:
            stack.start()
            stack.wait_ready()
        except BaseException:
            stack.stop()
            raise
        return cls(stack, plan, secret_file.read_bytes(), gate_port, brakes, copies)

    def close(self) -> None:
        """End the engines."""
        self.threads.shutdown(wait=False, cancel_futures=True)
        self.decode.close()
        self.prefill.close()
        self.stack.stop()

    # What happens to engines

    @contextmanager
    def frozen(self, role: Role) -> Any:
        """Stop one engine's processes (SIGSTOP) for the length of a block."""
        self.stack.kill(role, signal.SIGSTOP)
        try:
            yield
        finally:
            self.stack.kill(role, signal.SIGCONT)

    def kill(self, role: Role) -> None:
        """Kill one engine; `restart` must follow before the test ends, or `repair` does it."""
        self.dead.add(role)
        self.stack.kill(role)

    def restart(self, role: Role) -> None:
        """Start one engine anew, on its ports."""
        self.stack.restart(role)
        self.dead.discard(role)

    def repair(self) -> None:
        """Start again what a test has killed and left."""
        for role in list(self.dead):
            self.restart(role)

    def log(self, role: Role) -> str:
        """What an engine has logged."""
        return self.stack.log_file(role).read_text("utf-8", errors="replace")

    # What they say

    def headers(self, key: str | None = None) -> dict[str, str]:
        """Headers of a caller, by default the first tenant."""
        key = key or (self.api_keys[0] if self.api_keys else None)
        return {"Authorization": f"Bearer {key}"} if key else {}

    def talk(self, session_id: str | None = None, *, key: str | None = None) -> Talk:
        """Return a new session; its first turn opens it."""
        return Talk(self, session_id or f"test-{uuid.uuid4().hex}", self.headers(key))

    def sessions(self, key: str | None = None) -> list[dict[str, Any]]:
        """Return a tenant's sessions."""
        return self.decode.get("/v1/sessions", headers=self.headers(key)).raise_for_status().json()["data"]

    def end_sessions(self) -> None:
        """End every session of every tenant."""
        for key in self.api_keys or (None,):
            for session in self.sessions(key):
                self.decode.post(f"/v1/sessions/{session['session']}/end", headers=self.headers(key)).raise_for_status()

    def pool(self) -> dict[str, int]:
        """Return D's pool, through a session opened for that."""
        name = f"probe-{uuid.uuid4().hex}"
        headers = self.headers()
        opened = self.decode.post("/v1/sessions", json={"session_id": name}, headers=headers).raise_for_status()
        self.decode.delete(f"/v1/sessions/{name}", headers=headers).raise_for_status()
        return opened.json()["bidikv"]["pool"]

    def scrape(self, role: Role) -> str:
        """Return what one engine's `/metrics` says."""
        client = self.prefill if role == "prefill" else self.decode
        return client.get("/metrics").raise_for_status().text

    def metric(self, role: Role, name: str) -> float:
        """Return a metric of one engine, summed over its labels; `LookupError` where it is not served."""
        return total(self.scrape(role), name)

    def step(self, role: Role) -> None:
        """Make one engine take a step, so that its gauges are those of now."""
        client = self.prefill if role == "prefill" else self.decode
        body = {"model": TINY, "prompt": "x", "max_tokens": 1, "cache_salt": secrets.token_hex(8)}
        client.post("/v1/completions", json=body, headers=self.headers()).raise_for_status()

    def is_at_rest(self) -> bool:
        """Tell whether neither engine holds a block for anything, nor runs or queues a request."""
        for role in ("prefill", "decode"):
            self.step(role)
            busy = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
            if any(self.metric(role, f"vllm:{name}") for name in busy):
                return False
        num_blocks = self.pool_blocks
        return self.pool() == {"free_blocks": num_blocks, "total_blocks": num_blocks, "pending_ticket_blocks": 0}

    def text_of(self, token_ids: Sequence[int]) -> str:
        """Return the text of token ids, special tokens as well."""
        body = {"model": TINY, "tokens": list(token_ids)}
        return self.prefill.post("/detokenize", json=body).raise_for_status().json()["prompt"]

    def ids_of(self, text: str) -> list[int]:
        """Return the token ids of a text."""
        body = {"model": TINY, "prompt": text, "add_special_tokens": False}
        return self.prefill.post("/tokenize", json=body).raise_for_status().json()["tokens"]

    def recomputed(self, prompt_ids: Sequence[int], num_tokens: int) -> list[int]:
        """Return the tokens that stock vLLM generates on P behind a prompt, nothing of which is cached."""
        body = {
            "model": TINY,
            "prompt": list(prompt_ids),
            "max_tokens": num_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            "cache_salt": secrets.token_hex(8),
        }
        reply = self.prefill.post("/v1/completions", json=body).raise_for_status().json()
        return reply["choices"][0]["token_ids"]
