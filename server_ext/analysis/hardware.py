"""Constants of models, GPUs and links, each with its source, and reading a model's own `config.json`.

What is computed from them is in `limits`. All rates are per second, all sizes in bytes.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

_BF16_BYTES: Final = 2
_GB: Final = 1e9


class UnknownHardware(ValueError):
    """A name is not among the constants and is not a description; the text names the choices."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """What a model's shape says about the cost of its prompts."""

    name: str
    kv_bytes_per_token: int
    """Over all layers."""
    num_active_params: float
    """That one token passes through, embeddings excluded."""
    num_layers: int
    attention_dim: int
    """Query heads times head size."""
    weight_bytes: float
    max_context_tokens: int
    source: str

    @property
    def attention_tokens(self) -> float:
        """Length of a prompt at which attention costs as much as all else."""
        return self.num_active_params / (self.num_layers * self.attention_dim)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One accelerator."""

    name: str
    peak_flops: float
    """Dense 16-bit FLOP/s."""
    memory_bytes: float
    memory_bytes_per_s: float
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """The way from a decode to a prefill engine."""

    name: str
    bytes_per_s: float
    """What a transfer reaches, not the line rate."""
    source: str


def _dense(  # the arguments are the fields of a config.json
    name: str, *, params: float, layers: int, heads: int, kv_heads: int, head: int, context: int, total: float
) -> Model:
    return Model(
        name=name,
        kv_bytes_per_token=2 * layers * kv_heads * head * _BF16_BYTES,
        num_active_params=params,
        num_layers=layers,
        attention_dim=heads * head,
        weight_bytes=total * _BF16_BYTES,
        max_context_tokens=context,
        source=f"config.json on the model's page: {layers} layers, {kv_heads} KV heads of {head}, bf16",
    )


MODELS: Final[tuple[Model, ...]] = (
    _dense(
        "llama-3.1-8b",
        params=6.98e9,
        layers=32,
        heads=32,
        kv_heads=8,
        head=128,
        context=131_072,
        total=8.03e9,
    ),
    _dense(
        "llama-3.3-70b",
        params=68.45e9,
        layers=80,
        heads=64,
        kv_heads=8,
        head=128,
        context=131_072,
        total=70.55e9,
    ),
    _dense("qwen3-8b", params=6.95e9, layers=36, heads=32, kv_heads=8, head=128, context=131_072, total=8.19e9),
    _dense("qwen3-32b", params=31.2e9, layers=64, heads=64, kv_heads=8, head=128, context=131_072, total=32.8e9),
    # Mixture of experts: what is computed is the active part, what lies in memory is all of it.
    _dense("qwen3-30b-a3b", params=3.0e9, layers=48, heads=32, kv_heads=4, head=128, context=131_072, total=30.5e9),
    Model(
        name="deepseek-v3",
        kv_bytes_per_token=61 * (512 + 64) * _BF16_BYTES,
        num_active_params=36.6e9,
        num_layers=61,
        attention_dim=128 * (192 + 128) // 2,
        weight_bytes=671e9,  # published in fp8
        max_context_tokens=163_840,
        source="config.json on the model's page: 61 layers, latent attention of 512 + 64, bf16 cache, fp8 weights",
    ),
    Model(
        name="smollm2-135m",
        kv_bytes_per_token=2 * 30 * 3 * 64 * 4,
        num_active_params=1.06e8,
        num_layers=30,
        attention_dim=576,
        weight_bytes=1.35e8 * 4,
        max_context_tokens=8_192,
        source="config.json on the model's page: 30 layers, 3 KV heads of 64, float32 as `bidikv up` runs it on CPUs",
    ),
)

GPUS: Final[tuple[Gpu, ...]] = (
    Gpu(
        name="h100",
        peak_flops=989e12,
        memory_bytes=80 * _GB,
        memory_bytes_per_s=3.35e12,
        source="NVIDIA H100 SXM data sheet, without sparsity",
    ),
    Gpu(
        name="h200",
        peak_flops=989e12,
        memory_bytes=141 * _GB,
        memory_bytes_per_s=4.8e12,
        source="NVIDIA H200 SXM data sheet, without sparsity",
    ),
    Gpu(
        name="b200",
        peak_flops=2250e12,
        memory_bytes=180 * _GB,
        memory_bytes_per_s=8.0e12,
        source="NVIDIA DGX B200 data sheet, an eighth, without sparsity",
    ),
    Gpu(
        name="a100",
        peak_flops=312e12,
        memory_bytes=80 * _GB,
        memory_bytes_per_s=2.04e12,
        source="NVIDIA A100 80GB SXM data sheet, without sparsity",
    ),
    Gpu(
        name="l40s",
        peak_flops=362e12,
        memory_bytes=48 * _GB,
        memory_bytes_per_s=0.864e12,
        source="NVIDIA L40S data sheet, without sparsity",
    ),
    Gpu(
        name="mi300x",
        peak_flops=1307e12,
        memory_bytes=192 * _GB,
        memory_bytes_per_s=5.3e12,
        source="AMD Instinct MI300X data sheet, without sparsity",
    ),
    Gpu(
        name="cpu-core",
        peak_flops=64e9,
        memory_bytes=4 * _GB,
        memory_bytes_per_s=10e9,
        source="measured: SmolLM2-135M in float32 prefills 150 tokens/s on one core (32 GFLOP/s effective)",
    ),
)

LINKS: Final[tuple[Link, ...]] = (
    Link(name="nvlink", bytes_per_s=360e9, source="NVLink 4, 450 GB/s a direction, at 80 %"),
    Link(name="400g", bytes_per_s=45e9, source="400 Gbit/s InfiniBand or RoCE at 90 %"),
    Link(name="200g", bytes_per_s=22e9, source="200 Gbit/s at 88 %"),
    Link(name="100g", bytes_per_s=11e9, source="100 Gbit/s at 88 %"),
    Link(name="25g", bytes_per_s=2.5e9, source="25 Gbit/s Ethernet over TCP at 80 %"),
)

EFFICIENCY: Final = 0.5
"""Part of the peak that prefill reaches. 0.5 is usual for dense bf16 at long prompts."""
FIXED_S: Final = 0.020
"""Seconds that a transfer costs whatever its size: 20 ms fits published two-node vLLM results over NIXL."""
GPU_MEMORY_SHARE: Final = 0.9
"""Part of a GPU's memory that vLLM takes (its default `gpu_memory_utilization`)."""

_MOST: Final = 1 << 32
"""No count of a `config.json` is larger: then no product of them is too large for a float."""
_EXPERTS: Final = ("num_experts", "num_local_experts", "n_routed_experts")
"""How a `config.json` calls the number of experts that a layer chooses from."""

# No longer than hardware needs: neither infinite nor too small to divide by.
_NUMBER: Final = r"\d{1,9}(?:\.\d{1,9})?"
_GPU_TEXT: Final = re.compile(rf"({_NUMBER})TF,({_NUMBER})GB,({_NUMBER})GB/s", re.IGNORECASE)
_LINK_TEXT: Final = re.compile(rf"(?P<number>{_NUMBER})\s*GB/s", re.IGNORECASE)


def find_model(text: str) -> Model:
    """Return the model of a name (any case, an organisation before it is ignored) or of a `config.json`.

    Raises:
        UnknownHardware: it is neither, or the file cannot be read or does not describe a model.
    """
    path = Path(text)
    try:
        if path.is_dir():
            path /= "config.json"
        is_file = path.is_file()
    except OSError as error:  # such as a name that is too long, or a folder that is closed to us
        msg = f"--model {text!r:.80} cannot be looked for: {error.strerror}; give a known model, or a config.json"
        raise UnknownHardware(msg) from error
    if is_file:
        return read_model(path)
    name = text.rsplit("/", 1)[-1].lower().removesuffix("-instruct").replace("meta-", "")
    for model in MODELS:
        if model.name == name:
            return model
    choices = ", ".join(model.name for model in MODELS)
    msg = f"--model {text!r} is unknown: use one of {choices}, or the path of a config.json"
    raise UnknownHardware(msg)


def find_gpu(text: str) -> Gpu:
    """Return the GPU of a name, or of its dense 16-bit peak, memory and bandwidth as `989TF,80GB,3350GB/s`.

    Raises:
        UnknownHardware: it is neither.
    """
    for gpu in GPUS:
        if gpu.name == text.lower():
            return gpu
    match = _GPU_TEXT.fullmatch(text.replace(" ", ""))
    if match is not None and all(map(float, match.groups())):
        tera_flops, memory_gb, gb_per_s = map(float, match.groups())
        return Gpu(
            name=text,
            peak_flops=tera_flops * 1e12,
            memory_bytes=memory_gb * _GB,
            memory_bytes_per_s=gb_per_s * _GB,
            source="given on the command line",
        )
    choices = ", ".join(gpu.name for gpu in GPUS)
    msg = f"--gpu {text!r} is unknown: use one of {choices}, or for example 989TF,80GB,3350GB/s"
    raise UnknownHardware(msg)


def find_link(text: str) -> Link:
    """Return the link of a name, or of a bandwidth such as `12.5GB/s`.

    Raises:
        UnknownHardware: it is neither.
    """
    for link in LINKS:
        if link.name == text.lower():
            return link
    match = _LINK_TEXT.fullmatch(text.strip())
    if match is not None and float(match["number"]) > 0:
        return Link(name=text.strip(), bytes_per_s=float(match["number"]) * _GB, source="given on the command line")
    choices = ", ".join(link.name for link in LINKS)
    msg = f"--link {text!r} is unknown: use one of {choices}, or a bandwidth such as 12.5GB/s"
    raise UnknownHardware(msg)


def read_model(path: Path) -> Model:
    """Return the model that a Hugging Face `config.json` describes: Llama-like, or as DeepSeek's, experts included.

    Raises:
        UnknownHardware: it cannot be read, or a field is missing or makes no sense; the text names it.
    """
    try:
        config = json.loads(path.read_bytes())
        return _from_config(path.parent.name or "config.json", config.get("text_config", config), str(path))
    except (OSError, KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        msg = (
            f"--model {path}: not a model's config.json that this can read ({type(error).__name__}: {error}); give "
            "another one, a known model, or the measured --rates of your own engines"
        )
        raise UnknownHardware(msg) from error


def _from_config(name: str, config: Mapping[str, Any], source: str) -> Model:
    layers, hidden = _count(config, "num_hidden_layers"), _count(config, "hidden_size")
    heads = _count(config, "num_attention_heads")
    attention, attention_dim, cached = _attention(config, hidden, heads)
    dense, active_inner, all_inner = _widths(config)
    num_sparse = max(0, layers - _count_or_0(config, "first_k_dense_replace")) if all_inner else 0
    common = layers * attention + 3 * hidden * dense * (layers - num_sparse)
    active, total = (common + 3 * hidden * inner * num_sparse for inner in (active_inner, all_inner))
    total += 2 * _count(config, "vocab_size") * hidden
    value_bytes = 4 if "32" in str(config.get("torch_dtype") or config.get("dtype")) else _BF16_BYTES
    # DeepSeek-V3 calls its type bfloat16, which is what its fp8 weights are computed with.
    is_fp8 = (config.get("quantization_config") or {}).get("quant_method") == "fp8"
    return Model(
        name=name,
        kv_bytes_per_token=layers * cached * value_bytes,
        num_active_params=float(active),
        num_layers=layers,
        attention_dim=attention_dim,
        weight_bytes=float(total * (1 if is_fp8 else value_bytes)),
        max_context_tokens=_count(config, "max_position_embeddings"),
        source=source,
    )


def _attention(config: Mapping[str, Any], hidden: int, heads: int) -> tuple[int, int, int]:
    """Return a layer's parameters of attention, its width, and the values that are cached for a token."""
    latent = _count_or_0(config, "kv_lora_rank")
    if not latent:
        head = _count_or_0(config, "head_dim") or hidden // heads
        if not head:
            msg = f"num_attention_heads is {heads}, more than hidden_size, which is {hidden}"
            raise ValueError(msg)
        kv_heads = _count_or_0(config, "num_key_value_heads") or heads
        return hidden * head * (2 * heads + 2 * kv_heads), heads * head, 2 * kv_heads * head
    # Keys and values are made from one latent; beside it only the part of the keys that is rotated is cached.
    rotated, value = _count(config, "qk_rope_head_dim"), _count(config, "v_head_dim")
    plain, query = _count(config, "qk_nope_head_dim"), _count_or_0(config, "q_lora_rank")
    queries = query * (hidden + heads * (plain + rotated)) if query else hidden * heads * (plain + rotated)
    others = hidden * (latent + rotated) + latent * heads * (plain + value) + heads * value * hidden
    return queries + others, heads * (plain + rotated + value) // 2, latent + rotated


def _widths(config: Mapping[str, Any]) -> tuple[int, int, int]:
    """Return the inner width of a dense layer, and of a layer with experts a token's and all; 0 without experts."""
    dense = _count(config, "intermediate_size")
    num_experts = next(filter(None, (_count_or_0(config, name) for name in _EXPERTS)), 1)
    if num_experts <= 1:
        return dense, 0, 0
    inner = _count_or_0(config, "moe_intermediate_size") or dense
    shared = inner * _count_or_0(config, "n_shared_experts") + _count_or_0(config, "shared_expert_intermediate_size")
    return dense, inner * _count(config, "num_experts_per_tok") + shared, inner * num_experts + shared


def _count(config: Mapping[str, Any], name: str) -> int:
    """Return a field that counts something.

    Raises:
        KeyError: it is missing.
        ValueError: it is no whole number above 0, or more than any model has.
    """
    value = config[name]
    if not isinstance(value, int) or isinstance(value, bool) or not 0 < value <= _MOST:
        msg = f"{name} is {value!r:.80}, where a whole number from 1 to {_MOST:,} must be"
        raise ValueError(msg)
    return value


def _count_or_0(config: Mapping[str, Any], name: str) -> int:
    """Return a field that counts what a model may have none of: 0 where it is missing, null or 0."""
    return _count(config, name) if config.get(name) else 0
