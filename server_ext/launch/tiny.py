"""Makes a tiny random Llama for tests in which the model does not matter but its memory does.

Its weights are scaled so that attention decides the output: another history, or a wrong KV block, gives other
tokens, and greedy output wanders instead of settling on one token. Tokenizer and template are SmolLM2's.
"""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

from server_ext.launch.model import cache_dir, ensure_smollm2, publish, write_config

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

TINY = "tiny-random-llama"
"""Name of the folder, and a served model name that tells nobody it is a good model."""

_FORMAT = 1  # part of the folder's name, as in `model`
_SEED = 20
_LAYERS, _HIDDEN, _INTERMEDIATE = 2, 64, 128
_HEADS, _KV_HEADS, _HEAD_DIM = 4, 2, 32  # 32 is the smallest head that vLLM's CPU attention takes
_VOCAB, _MAX_POSITIONS = 49152, 8192
_SPECIAL_TOKENS = 17  # ids 0..16; never the most likely, so that no answer ends early


def ensure_tiny(say: Callable[[str], None] = lambda _: None) -> Path:
    """The folder of the tiny model (float32, 8192 positions, 25 MB), made if it is not there yet."""

    def build(out: Path) -> None:
        source = ensure_smollm2(say)
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(source / name, out / name)
        _write_weights(out)

    return publish(cache_dir() / "models" / f"{TINY}-v{_FORMAT}", build)


def _write_weights(out: Path) -> None:
    import torch
    from safetensors.torch import save_file

    random = torch.Generator().manual_seed(_SEED)

    def matrix(rows: int, columns: int, gain: float) -> torch.Tensor:
        return torch.randn(rows, columns, generator=random) * (gain * columns**-0.5)

    embed = torch.randn(_VOCAB, _HIDDEN, generator=random)
    head = matrix(_VOCAB, _HIDDEN, gain=1.0)
    head[:_SPECIAL_TOKENS] = 0.0
    ones = torch.ones(_HIDDEN)
    weights = {"model.embed_tokens.weight": embed, "lm_head.weight": head, "model.norm.weight": ones}
    for layer in range(_LAYERS):
        shapes = {
            "self_attn.q_proj": (_HEADS * _HEAD_DIM, _HIDDEN, 2.0),
            "self_attn.k_proj": (_KV_HEADS * _HEAD_DIM, _HIDDEN, 2.0),
            "self_attn.v_proj": (_KV_HEADS * _HEAD_DIM, _HIDDEN, 1.0),
            # A long history averages out what attention brings; this gain keeps it above the token itself.
            "self_attn.o_proj": (_HIDDEN, _HEADS * _HEAD_DIM, 4.0),
            "mlp.gate_proj": (_INTERMEDIATE, _HIDDEN, 1.0),
            "mlp.up_proj": (_INTERMEDIATE, _HIDDEN, 1.0),
            "mlp.down_proj": (_HIDDEN, _INTERMEDIATE, 1.0),
        }
        prefix = f"model.layers.{layer}"
        weights |= {f"{prefix}.{name}.weight": matrix(*shape) for name, shape in shapes.items()}
        weights |= {f"{prefix}.{n}.weight": ones.clone() for n in ("input_layernorm", "post_attention_layernorm")}
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    write_config(
        out,
        hidden_size=_HIDDEN,
        intermediate_size=_INTERMEDIATE,
        num_hidden_layers=_LAYERS,
        num_attention_heads=_HEADS,
        num_key_value_heads=_KV_HEADS,
        head_dim=_HEAD_DIM,
        vocab_size=_VOCAB,
        max_position_embeddings=_MAX_POSITIONS,
        rms_norm_eps=1e-5,
        rope_theta=100_000.0,
        tie_word_embeddings=False,
        torch_dtype="float32",
    )
