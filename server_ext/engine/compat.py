"""The only module that knows which vLLM it runs on.

Every vLLM name that may change between versions is imported here and nowhere else, the patch of one instance
(`guard_allocations`) checks the signature that it relies on, and `refuse_unsupported` says at start-up what this
design does not serve. Written against vLLM 0.32; another version is refused instead of trusted.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import inspect
import json
import uuid
from typing import TYPE_CHECKING, Any

import vllm
from vllm import SamplingParams
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole, KVConnectorWorkerMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector import NixlBaseConnector, NixlPullConnector
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_scheduler import NixlPullConnectorScheduler
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_worker import NixlPullConnectorWorker
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest, ChatCompletionResponse
from vllm.entrypoints.serve import create_error_response
from vllm.entrypoints.serve.utils.api_utils import load_aware_call, validate_json_request, with_cancellation
from vllm.entrypoints.serve.utils.sse_keep_alive import with_sse_keep_alive
from vllm.exceptions import VLLMError
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.v1.engine.core import EngineCore
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.request import Request, RequestStatus

from bidikv_sdk.prefix import num_blocks as blocks_for

if TYPE_CHECKING:
    from collections.abc import Callable

    from vllm.config import VllmConfig
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.kv_cache_interface import KVCacheConfig

__all__ = [
    "ChatCompletionRequest",
    "ChatCompletionResponse",
    "EngineDeadError",
    "KVConnectorRole",
    "KVConnectorWorkerMetadata",
    "NixlBaseConnector",
    "NixlPullConnector",
    "NixlPullConnectorScheduler",
    "NixlPullConnectorWorker",
    "Request",
    "RequestStatus",
    "SamplingParams",
    "VLLMError",
    "attention_tokens",
    "call_control",
    "create_error_response",
    "engine_facts",
    "guard_allocations",
    "init_logger",
    "install_control",
    "is_cpu_platform",
    "load_aware_call",
    "model_fingerprint",
    "pause_nixl_progress_thread",
    "refuse_unsupported",
    "require_supported_version",
    "validate_json_request",
    "with_cancellation",
    "with_sse_keep_alive",
]

SUPPORTED_VERSIONS = ("0.32",)

# Fewer tokens than this NIXL's reader does not fetch where nothing else is set.
_STOCK_RECOMPUTE_THRESHOLD = 64


def require_supported_version() -> None:
    """Refuse a vLLM that this module was not written for.

    Raises:
        RuntimeError: the installed version is not one of `SUPPORTED_VERSIONS`.
    """
    version = vllm.__version__
    if not version.startswith(tuple(f"{supported}." for supported in SUPPORTED_VERSIONS)):
        msg = (
            f"bidikv supports vLLM {', '.join(SUPPORTED_VERSIONS)}, but {version} is installed; "
            "install a supported version or take 'bidikv' and 'bidikv_http' out of VLLM_PLUGINS"
        )
        raise RuntimeError(msg)


def refuse_unsupported(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, *, reads: bool) -> None:
    """Refuse at start-up what this design does not serve.

    Args:
        vllm_config: the engine's configuration.
        kv_cache_config: its KV cache groups.
        reads: True on an engine that reads leased blocks (P).

    Raises:
        ValueError: names the setting, its value and the fix.
    """
    transfer = vllm_config.kv_transfer_config
    parallel = vllm_config.parallel_config
    num_api_servers = parallel._api_process_count  # noqa: SLF001 - the count goes no other way to an engine
    exchanges = bool(transfer.get_from_extra_config("bidirectional_kv_xfer", default=False))
    groups = kv_cache_config.kv_cache_groups
    attention = [_describe(group.kv_cache_spec) for group in groups]
    host_buffer = current_platform.device_type != "cpu" and transfer.kv_buffer_device == "cpu"
    refusals = [
        (
            host_buffer,
            (
                "kv_buffer_device='cpu' on a GPU stages KV in host buffers that leased blocks never reach; "
                "set kv_buffer_device='cuda'"
            ),
        ),
        (
            reads and transfer.kv_role != "kv_both",
            (
                f"kv_role={transfer.kv_role!r} on an engine that reads leases: blocks could be freed under a running "
                "step; set kv_role='kv_both'"
            ),
        ),
        (
            reads != exchanges,
            (
                f"bidirectional_kv_xfer={exchanges} in kv_connector_extra_config: without it P would wait for ever for "
                "what it reads, and with it D would hold every turn's blocks for minutes; set it to true on P only"
            ),
        ),
        (
            transfer.kv_load_failure_policy != "recompute",
            (
                f"kv_load_failure_policy={transfer.kv_load_failure_policy!r} makes a failed read an error of the "
                "request; set it to 'recompute'"
            ),
        ),
        (
            len(groups) != 1 or not _is_plain_full_attention(groups[0].kv_cache_spec),
            (
                f"KV cache groups {attention}: only models with one group of plain full attention are supported; "
                "serve hybrid, sliding-window, latent-attention (MLA) and state-space models without bidikv"
            ),
        ),
        (
            parallel.tensor_parallel_size != 1 or parallel.pipeline_parallel_size != 1,
            (
                f"tensor_parallel_size={parallel.tensor_parallel_size}, "
                f"pipeline_parallel_size={parallel.pipeline_parallel_size}: not tested yet; use 1 and 1"
            ),
        ),
        (
            parallel.data_parallel_size != 1,
            f"data_parallel_size={parallel.data_parallel_size}: not tested yet; use 1",
        ),
        (
            parallel.decode_context_parallel_size != 1 or parallel.prefill_context_parallel_size != 1,
            "context parallelism: not tested yet; use 1",
        ),
        (
            num_api_servers != 1,
            f"--api-server-count={num_api_servers}: not tested yet; use 1, which is the default",
        ),
        (
            vllm_config.lora_config is not None,
            "LoRA adapters: not tested yet; start without --enable-lora",
        ),
        (
            vllm_config.speculative_config is not None,
            "speculative decoding: not tested yet; start without speculative_config",
        ),
        (
            not vllm_config.cache_config.enable_prefix_caching,
            "prefix caching is off, so D could not use its own leased blocks; enable it",
        ),
        (
            not _is_minted(transfer.engine_id),
            (
                f"engine_id={transfer.engine_id!r} stays the same when the engine is started again, so that tickets of "
                "its former life would be believed; leave engine_id out, and vLLM makes one up at each start"
            ),
        ),
    ]
    for refused, why in refusals:
        if refused:
            msg = f"bidikv cannot serve this configuration: {why}"
            raise ValueError(msg)


def _is_plain_full_attention(spec: Any) -> bool:
    """Tell whether a request's blocks are those of its tokens, all of them, and depend on nothing that comes later.

    The class itself: one subclass drops blocks from the middle (`RSWASpec`), one puts others in front
    (`SinkFullAttentionSpec`), and what latent attention keeps (`MLAAttentionSpec`) has not been tested.
    """
    return (
        type(spec) is FullAttentionSpec
        and spec.sliding_window is None
        and spec.attention_chunk_size is None
        and not spec.non_causal
    )


def _describe(spec: Any) -> str:
    """Return a spec's class, and what else of it may be why it is refused."""
    named = ("sliding_window", "attention_chunk_size", "non_causal")
    values = [f"{name}={getattr(spec, name)}" for name in named if getattr(spec, name, None)]
    return f"{type(spec).__name__}({', '.join(values)})"


def _is_minted(engine_id: str) -> bool:
    """Tell whether an engine's id looks like those that vLLM makes up."""
    try:
        uuid.UUID(engine_id)
    except ValueError:
        return False
    return True


def model_fingerprint(vllm_config: VllmConfig) -> str:
    """Name what the KV cache of a token sequence depends on, apart from the version of the weights.

    Returns:
        A short hash over the model's own configuration, dtypes and block size; equal on P and D where a block of one
        is valid on the other. The name or path of the model is left out, as it may differ between machines.
    """
    cache = vllm_config.cache_config
    facts = [_own_config(vllm_config), str(vllm_config.model_config.dtype), str(cache.cache_dtype), cache.block_size]
    return _short_hash(facts)


def engine_facts(vllm_config: VllmConfig) -> dict[str, Any]:
    """Return what this engine runs and how, as plain values: each is a reason why P and D may not fit together.

    `model` is a hash over the model's own configuration: its path does not matter. Needs a `kv_transfer_config`.
    """
    model, cache, transfer = vllm_config.model_config, vllm_config.cache_config, vllm_config.kv_transfer_config
    extra = transfer.kv_connector_extra_config or {}
    return {
        "vllm": vllm.__version__,
        "platform": current_platform.device_type,
        "model": _short_hash(_own_config(vllm_config)),
        "dtype": str(model.dtype).removeprefix("torch."),
        "kv_cache_dtype": str(cache.cache_dtype),
        "block_size": cache.block_size,
        "max_model_len": model.max_model_len,
        "prefix_caching": bool(cache.enable_prefix_caching),
        "max_num_batched_tokens": vllm_config.scheduler_config.max_num_batched_tokens,
        "kv_connector": transfer.kv_connector,
        "kv_role": transfer.kv_role,
        "bidirectional_kv_xfer": bool(extra.get("bidirectional_kv_xfer", False)),
        "kv_recompute_threshold": extra.get("kv_recompute_threshold", _STOCK_RECOMPUTE_THRESHOLD),
    }


def _own_config(vllm_config: VllmConfig) -> dict[str, Any]:
    return {k: v for k, v in vllm_config.model_config.hf_config.to_dict().items() if k != "_name_or_path"}


def _short_hash(facts: Any) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()[:16]


def install_control(control: Callable[[Any, str, dict[str, Any]], dict[str, Any]]) -> None:
    """Add the method `bidikv_control(op, arg)` to vLLM's engine core, and tell connectors of new weights.

    Args:
        control: called as `control(connector, op, arg)` on the scheduler's thread, between steps.
    """
    if hasattr(EngineCore, "bidikv_control"):
        return  # vLLM loads general plugins once per process, tests perhaps more often

    def bidikv_control(self: Any, op: str, arg: dict[str, Any]) -> dict[str, Any]:
        return control(self.scheduler.get_kv_connector(), op, arg)

    set_weight_version = EngineCore.set_weight_version

    @functools.wraps(set_weight_version)
    def set_and_tell(self: Any, weight_version: str) -> None:
        set_weight_version(self, weight_version)
        on_weight_version = getattr(self.scheduler.get_kv_connector(), "on_weight_version", None)
        if on_weight_version is not None:
            on_weight_version(weight_version)

    EngineCore.bidikv_control = bidikv_control
    EngineCore.set_weight_version = set_and_tell


async def call_control(engine_client: Any, op: str, arg: dict[str, Any]) -> dict[str, Any]:
    """Call `bidikv_control` of the engine core behind an API server's engine client.

    Returns:
        The reply of the op.

    Raises:
        Exception: whatever the engine client raises where the engine is dead or shutting down.
    """
    # Never call_utility_async of a data-parallel client: it broadcasts to every rank (refused at start-up for now).
    reply: dict[str, Any] = await engine_client.engine_core.call_utility_async("bidikv_control", op, arg)
    return reply


def guard_allocations(
    manager: KVCacheManager,
    make_room: Callable[[int], bool],
    before_reset: Callable[[], bool],
) -> None:
    """Let live requests win over leases: revoke and retry inside the same allocation.

    vLLM asks its cache manager for slots and either preempts a running request or leaves a waiting one waiting when
    the answer is None; connectors are not asked in between. So the two methods of this one instance are wrapped.
    A failed `allocate_slots` has changed nothing but dropped blocks out of a sliding window (idempotent), hence it
    may be called again.

    Args:
        manager: the scheduler's cache manager.
        make_room: called with the least number of free blocks that are missing, as often as the allocation fails;
            returns False where it freed nothing, and then the allocation's None stands.
        before_reset: called before the prefix cache is reset; False refuses the reset.

    Raises:
        RuntimeError: `allocate_slots` does not have the parameters that this guard was written for.
    """
    allocate = manager.allocate_slots
    reset = manager.reset_prefix_cache
    pool = manager.block_pool

    # Every running request comes through here in every step. To pass *args and **kwargs on takes
    # three times as long, and with many requests more than all else that we do in a step.
    def allocate_slots(  # noqa: PLR0913, PLR0917 (vLLM's own parameters, compared below)
        request: Request,
        num_new_tokens: int,
        num_new_computed_tokens: int = 0,
        new_computed_blocks: Any = None,
        num_lookahead_tokens: int = 0,
        num_external_computed_tokens: int = 0,
        delay_cache_blocks: bool = False,  # noqa: FBT001, FBT002
        num_encoder_tokens: int = 0,
        full_sequence_must_fit: bool = False,  # noqa: FBT001, FBT002
        reserved_blocks: int = 0,
        has_scheduled_reqs: bool = True,  # noqa: FBT001, FBT002
        skip_zeroing_group_ids: tuple[int, ...] = (),
    ) -> Any:
        given = (
            request,
            num_new_tokens,
            num_new_computed_tokens,
            new_computed_blocks,
            num_lookahead_tokens,
            num_external_computed_tokens,
            delay_cache_blocks,
            num_encoder_tokens,
            full_sequence_must_fit,
            reserved_blocks,
            has_scheduled_reqs,
            skip_zeroing_group_ids,
        )
        slots = allocate(*given)
        if slots is not None:
            return slots
        arguments = dict(zip(names, given, strict=True))
        # The request's own prefix hits gain nothing by being unpinned: they would be taken out of the free list again.
        hits = [block for group in _hits(arguments) for block in group if block.ref_cnt > 0]
        pool.touch(hits)
        try:
            while slots is None and make_room(_num_missing_blocks(manager, arguments)):
                slots = allocate(*given)
        finally:
            pool.free_blocks(reversed(hits))
        return slots

    # A vLLM that changes a name, a default or the order changed what an allocation needs.
    parameters, theirs = _parameters(allocate_slots), _parameters(allocate)
    if theirs != parameters:
        msg = f"KVCacheManager.allocate_slots has unknown parameters: {', '.join(map(str, theirs))}"
        raise RuntimeError(msg)
    names = [parameter.name for parameter in parameters]

    @functools.wraps(reset)
    def reset_prefix_cache() -> bool:
        return before_reset() and reset()

    manager.allocate_slots = allocate_slots
    manager.reset_prefix_cache = reset_prefix_cache


def _parameters(function: Callable[..., Any]) -> list[inspect.Parameter]:
    """Return the parameters of a function in order, with their defaults and without their types."""
    parameters = inspect.signature(function).parameters.values()
    return [parameter.replace(annotation=inspect.Parameter.empty) for parameter in parameters]


def _hits(arguments: dict[str, Any]) -> tuple[Any, ...]:
    hits = arguments["new_computed_blocks"]
    return () if hits is None else tuple(hits.blocks)


def _num_missing_blocks(manager: KVCacheManager, arguments: dict[str, Any]) -> int:
    """Return the least number of blocks that must become free before this allocation can succeed (at least 1)."""
    request = arguments["request"]
    num_tokens = (
        request.num_computed_tokens
        + arguments["num_new_computed_tokens"]
        + arguments["num_external_computed_tokens"]
        + arguments["num_new_tokens"]
    )
    if arguments["full_sequence_must_fit"]:
        num_tokens = max(num_tokens, request.num_tokens)
    block_pool: BlockPool = manager.block_pool
    block_size = manager.kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size
    num_held = sum(len(group) for group in manager.get_block_ids(request.request_id))
    num_hits = sum(block.ref_cnt > 0 for group in _hits(arguments) for block in group)
    num_wanted = blocks_for(num_tokens, block_size) - num_held - num_hits + arguments["reserved_blocks"]
    return max(1, num_wanted - block_pool.get_num_free_blocks())


def pause_nixl_progress_thread(delay_us: int) -> None:
    """Make NIXL's UCX progress thread sleep between polls.

    NIXL's Python API sets a delay of 0, with which an idle engine burns a whole core; on a CPU machine that core is
    half of the machine. Does nothing where NIXL is not installed.

    Args:
        delay_us: pause between two polls, in microseconds.
    """
    if importlib.util.find_spec("nixl") is None:
        return
    import nixl._api as nixl_api

    build = nixl_api.nixlBind.nixlAgent
    if getattr(build, "bidikv_paused", False):
        return

    def build_with_pause(name: str, config: Any) -> Any:
        config.pthrDelay = delay_us
        return build(name, config)

    build_with_pause.bidikv_paused = True  # type: ignore[attr-defined]
    nixl_api.nixlBind.nixlAgent = build_with_pause


def attention_tokens(vllm_config: VllmConfig) -> float:
    """Return the length of a prompt at which attention costs as much as the weights, of a dense model's shape."""
    model = vllm_config.model_config
    parallel, config = vllm_config.parallel_config, model.hf_text_config
    hidden, attention = model.get_hidden_size(), model.get_num_attention_heads(parallel) * model.get_head_size()
    key_value = model.get_num_kv_heads(parallel) * model.get_head_size()
    feed_forward = getattr(config, "intermediate_size", None) or 4 * hidden
    num_weights_per_layer = 2 * hidden * (attention + key_value) + 3 * hidden * feed_forward
    return float(num_weights_per_layer / attention)


def is_cpu_platform() -> bool:
    """Tell whether vLLM runs its models on the CPU here."""
    return bool(current_platform.device_type == "cpu")
