"""Says how both engines are started: one pure function from a `StackConfig` to arguments and environment.

`engine_command(config, role, base_env)` for "prefill" (P) and "decode" (D). No clock, no process, no file is
touched here; `stack` runs what this module answers.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

Role = Literal["prefill", "decode"]
ROLES: tuple[Role, Role] = ("prefill", "decode")

PLUGINS = ("bidikv", "bidikv_http")
"""Entry-point names of ours that vLLM loads only if VLLM_PLUGINS names them."""

_HOST = "127.0.0.1"

# A control call waits for the step that runs, so D's steps are short; P has no such calls, and larger chunks
# gain nothing on a CPU. On GPUs steps are short anyhow: vLLM's own defaults stand.
CPU_STEP_TOKENS: dict[Role, int] = {"prefill": 512, "decode": 256}

CPU_ENV = {
    # Two engines share a small machine's two cores: an agent's turn is computed by one of them at a time, so each
    # uses both, its threads left where the kernel puts them.
    "OMP_NUM_THREADS": "2",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    # How often libgomp looks before it lets a waiting thread sleep, half a millisecond or so: long enough for the next
    # layer, too short to take a core from the other engine. Its own default spins for milliseconds; to sleep at once,
    # or nearly, costs an eighth of the speed.
    "GOMP_SPINCOUNT": "20000",
    # Keeps vLLM from turning the executor `uni` into `mp` on CPUs, whose worker process polls shared memory.
    # The engine core stays a process of its own: the API server never runs it inside, whatever this says.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}
"""Of every engine on a CPU."""
# Of NIXL, beside its polling thread. vLLM's 4 spin while they read, on cores that then compute slower, and leave
# connections behind that nobody serves: behind a read of 1,024 pieces D's polling thread may never sleep again.
CPU_NIXL_THREADS = 0
# What a user may have set with good reason.
_CPU_ENV_DEFAULTS = {"UCX_TLS": "tcp,shm,self"}


@dataclass(frozen=True, kw_only=True)
class EnginePorts:
    """Where one engine listens, on 127.0.0.1: HTTP, and NIXL's handshakes."""

    http: int
    side_channel: int


@dataclass(frozen=True, kw_only=True)
class StackConfig:
    """One P and one D on this machine; the defaults suit a small model on two cores."""

    model: str
    """A folder, or a name that vLLM can load."""
    served_name: str
    prefill: EnginePorts
    decode: EnginePorts
    secret_file: Path
    """32 random bytes that P and D share; tickets are signed with them."""
    platform: Literal["cpu", "gpu"] = "cpu"
    offline: bool = True
    """Keep the engines from asking a model hub; true wherever `model` is a folder."""
    kv_cache_bytes: int | None = 1 << 30
    """Size of each engine's KV cache; None leaves it to vLLM."""
    max_model_len: int | None = None
    """Longest prompt plus answer in tokens; None is the model's own limit."""
    block_size: int | None = None
    """Tokens per KV block; None is 32 on CPUs (attention wants multiples of it), vLLM's default on GPUs."""
    tool_call_parser: str | None = None
    """Name of vLLM's tool parser; None serves without tool calls."""
    gpus: tuple[str, str] = ("0", "1")
    """CUDA devices of P and of D; may be the same one, with `gpu_memory_utilization` below one half."""
    gpu_memory_utilization: float | None = None
    api_keys: tuple[str, ...] = ()
    """Keys that D accepts, a tenant each; empty serves everybody who reaches the port, as one tenant."""
    fresh_prefill_salt: bool = False
    """Debugging: P's own prefix cache never helps, so that each turn shows what fetching alone gains."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Further settings of D (`default_ttl_s`, `budget_fraction`, …); checked by the server when it starts."""
    prefill_settings: Mapping[str, Any] = field(default_factory=dict)
    """The same for P."""
    extra_args: Mapping[Role, tuple[str, ...]] = field(default_factory=dict)
    """Arguments for vLLM, put last, so that they win."""
    extra_env: Mapping[str, str] = field(default_factory=dict)

    def ports(self, role: Role) -> EnginePorts:
        """The ports of one engine."""
        return self.prefill if role == "prefill" else self.decode

    def url(self, role: Role) -> str:
        """The base URL of one engine, without a slash at its end; D's is the one that clients use."""
        return f"http://{_HOST}:{self.ports(role).http}"


@dataclass(frozen=True)
class EngineCommand:
    """What to run: the argument list, and the whole environment."""

    argv: tuple[str, ...]
    env: dict[str, str] = field(repr=False)  # holds keys


def engine_command(config: StackConfig, role: Role, base_env: Mapping[str, str]) -> EngineCommand:
    """How one engine is started.

    Args:
        config: The stack.
        role: Which of its engines.
        base_env: The environment to build on, usually `os.environ`; it is not changed.
    """
    return EngineCommand(tuple(_argv(config, role)), _env(config, role, base_env))


def merge_plugins(current: str | None) -> str:
    """The value of VLLM_PLUGINS that also names our plugins.

    Args:
        current: Its value now; None where it is unset.
    """
    names = [name for name in (current or "").split(",") if name]
    return ",".join([*names, *(plugin for plugin in PLUGINS if plugin not in names)])


def disabled_plugins(current: str | None, installed: Iterable[str]) -> list[str]:
    """Installed vLLM plugins that the VLLM_PLUGINS we set keeps from loading: worth a warning.

    VLLM_PLUGINS is one allowlist for all groups of plugins; while it is unset, all but endpoint plugins load.

    Args:
        current: VLLM_PLUGINS now; None where it is unset.
        installed: Entry-point names, endpoint plugins left out.
    """
    return sorted(set(installed) - set(PLUGINS)) if current is None else []


def kv_transfer_config(config: StackConfig, role: Role) -> dict[str, Any]:
    """The value of vLLM's `--kv-transfer-config` for one engine."""
    extra: dict[str, Any] = {"num_threads": CPU_NIXL_THREADS} if config.platform == "cpu" else {}
    ours: dict[str, Any] = {"role": role, "secret_file": str(config.secret_file)}
    if role == "prefill":
        # kv_both, not kv_producer: only then are freed blocks held back while P still writes what it reads.
        # The threshold is vLLM's own "too little to fetch", which D decides before it hands out a ticket.
        kv_role = "kv_both"
        extra |= {"bidirectional_kv_xfer": True, "kv_recompute_threshold": 0}
        ours |= config.prefill_settings
    else:
        kv_role = "kv_consumer"
        ours["prefill_urls"] = [config.url("prefill")]
        if config.fresh_prefill_salt:
            ours["fresh_prefill_salt"] = True
        ours |= config.settings
    return {
        "kv_connector": "BidiKVConnector",
        "kv_connector_module_path": "server_ext.engine.connector",
        "kv_role": kv_role,
        "kv_load_failure_policy": "recompute",
        # Never host memory on a GPU: leased blocks are not copied there, and a reader would get garbage.
        "kv_buffer_device": "cpu" if config.platform == "cpu" else "cuda",
        "kv_connector_extra_config": {**extra, "bidikv": ours},
    }


def _argv(config: StackConfig, role: Role) -> list[str]:
    # `python -m` and not the command `vllm`: that one fails where the distribution is called vllm-cpu.
    argv = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    argv += ["--model", config.model, "--served-model-name", config.served_name]
    argv += ["--host", _HOST, "--port", str(config.ports(role).http)]
    argv += ["--enable-prompt-tokens-details"]
    if config.max_model_len is not None:
        argv += ["--max-model-len", str(config.max_model_len)]
    if config.kv_cache_bytes is not None:
        argv += ["--kv-cache-memory-bytes", str(config.kv_cache_bytes)]
    block_size = config.block_size or (32 if config.platform == "cpu" else None)
    if block_size is not None:
        argv += ["--block-size", str(block_size)]
    if config.platform == "cpu":
        # bfloat16 is emulated on most CPUs, and ten times slower.
        argv += ["--dtype", "float32", "--enforce-eager", "--distributed-executor-backend", "uni"]
        argv += ["--max-num-batched-tokens", str(CPU_STEP_TOKENS[role])]
    elif config.gpu_memory_utilization is not None:
        argv += ["--gpu-memory-utilization", str(config.gpu_memory_utilization)]
    if role == "decode" and config.tool_call_parser is not None:
        argv += ["--enable-auto-tool-choice", "--tool-call-parser", config.tool_call_parser]
    if role == "decode" and len(config.api_keys) > 1:
        argv += [
            "--api-key",
            *config.api_keys,
        ]  # vLLM takes several keys here only; one stays out of `ps` (_env)
    argv += ["--kv-transfer-config", json.dumps(kv_transfer_config(config, role))]
    return [*argv, *config.extra_args.get(role, ())]


def _env(config: StackConfig, role: Role, base_env: Mapping[str, str]) -> dict[str, str]:
    env = {name: value for name, value in base_env.items() if name not in {"VLLM_CPU_KVCACHE_SPACE", "VLLM_API_KEY"}}
    env["VLLM_PLUGINS"] = merge_plugins(base_env.get("VLLM_PLUGINS"))
    env["VLLM_NIXL_SIDE_CHANNEL_HOST"] = _HOST
    env["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(config.ports(role).side_channel)
    env["VLLM_NO_USAGE_STATS"] = "1"
    if config.offline:
        env["HF_HUB_OFFLINE"] = "1"
    if config.platform == "cpu":
        env = {**_CPU_ENV_DEFAULTS, **env, **CPU_ENV}
    else:
        env["CUDA_VISIBLE_DEVICES"] = config.gpus[ROLES.index(role)]
    if role == "decode" and len(config.api_keys) == 1:
        env["VLLM_API_KEY"] = config.api_keys[0]
    return {**env, **config.extra_env}
