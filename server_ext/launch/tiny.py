"""Makes small random Llamas for runs in which the model does not matter but its memory does.

Their weights are scaled so that attention decides the output: another history, or a wrong KV block, gives other
tokens, and greedy output wanders instead of settling on one token. Tokenizer and template are SmolLM2's.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from typing import TYPE_CHECKING

from server_ext.launch.model import cache_dir, ensure_smollm2, publish, write_config

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

TINY = "tiny-random-llama"
"""Name of the folder, and a served model name that tells nobody it is a good model."""

_FORMAT = 1  # part of the folder's name, as in `model`
_SEED = 20
_LAYERS = 2
_VOCAB, _MAX_POSITIONS = 49152, 8192
_SPECIAL_TOKENS = 17  # ids 0..16; never the most likely, so that no answer ends early


@dataclass(frozen=True)
class RandomLlama:
    """A random model: float32, two layers, 8192 positions."""

    name: str
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int

    def kv_bytes(self, num_tokens: int) -> int:
        """Size of the KV cache of so many tokens."""
        return num_tokens * _LAYERS * 2 * self.kv_heads * self.head_dim * 4


# 32 is the smallest head that vLLM's CPU attention takes.
_TINY_LLAMA = RandomLlama(TINY, hidden=64, intermediate=128, heads=4, kv_heads=2, head_dim=32)
WIDE = RandomLlama("wide-random-llama", hidden=1024, intermediate=128, heads=2, kv_heads=1, head_dim=64)
"""400 MB, nearly all of it in the two vocabulary matrices: decoding is as slow as a real model's, prefill is cheap."""


def ensure_tiny(say: Callable[[str], None] = lambda _: None, size: RandomLlama = _TINY_LLAMA) -> Path:
    """The folder of a random model, by default the tiny one (25 MB), made if it is not there yet."""

    def build(out: Path) -> None:
        source = ensure_smollm2(say)
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(source / name, out / name)
        _write_weights(out, size)

    return publish(cache_dir() / "models" / f"{size.name}-v{_FORMAT}", build)


def _write_weights(out: Path, size: RandomLlama) -> None:
    import torch
    from safetensors.torch import save_file

    random = torch.Generator().manual_seed(_SEED)

    def matrix(rows: int, columns: int, gain: float) -> torch.Tensor:
        return torch.randn(rows, columns, generator=random) * (gain * columns**-0.5)

    embed = torch.randn(_VOCAB, size.hidden, generator=random)
    head = matrix(_VOCAB, size.hidden, gain=1.0)
    head[:_SPECIAL_TOKENS] = 0.0
    ones = torch.ones(size.hidden)
    weights = {"model.embed_tokens.weight": embed, "lm_head.weight": head, "model.norm.weight": ones}
    for layer in range(_LAYERS):
        shapes = {
            "self_attn.q_proj": (size.heads * size.head_dim, size.hidden, 2.0),
            "self_attn.k_proj": (size.kv_heads * size.head_dim, size.hidden, 2.0),
            "self_attn.v_proj": (size.kv_heads * size.head_dim, size.hidden, 1.0),
            # A long history averages out what attention brings; this gain keeps it above the token itself.
            "self_attn.o_proj": (size.hidden, size.heads * size.head_dim, 4.0),
            "mlp.gate_proj": (size.intermediate, size.hidden, 1.0),
            "mlp.up_proj": (size.intermediate, size.hidden, 1.0),
            "mlp.down_proj": (size.hidden, size.intermediate, 1.0),
        }
        prefix = f"model.layers.{layer}"
        weights |= {f"{prefix}.{name}.weight": matrix(*shape) for name, shape in shapes.items()}
        weights |= {f"{prefix}.{n}.weight": ones.clone() for n in ("input_layernorm", "post_attention_layernorm")}
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    write_config(
        out,
        hidden_size=size.hidden,
        intermediate_size=size.intermediate,
        num_hidden_layers=_LAYERS,
        num_attention_heads=size.heads,
        num_key_value_heads=size.kv_heads,
        head_dim=size.head_dim,
        vocab_size=_VOCAB,
        max_position_embeddings=_MAX_POSITIONS,
        rms_norm_eps=1e-5,
        rope_theta=100_000.0,
        tie_word_embeddings=False,
        torch_dtype="float32",
    )
