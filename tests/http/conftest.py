"""vLLM's own renderer over the tiny model's tokenizer, and D's API server around it; no engine anywhere."""

import warnings
from pathlib import Path

import pytest

from server_ext.launch.tiny import ensure_tiny

with warnings.catch_warnings():
    # Warnings are errors, but what torch and vLLM say while they are imported is not ours to mend.
    warnings.simplefilter("ignore")
    from vllm.engine.arg_utils import EngineArgs
    from vllm.renderers import renderer_from_config

    from .fakes import MAX_MODEL_LEN, Stack


@pytest.fixture(scope="session")
def vllm_config():
    """Return vLLM's configuration of the tiny model."""
    with warnings.catch_warnings(), pytest.MonkeyPatch.context() as patch:
        warnings.simplefilter("ignore")
        patch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
        args = EngineArgs(model=str(Path(ensure_tiny())), dtype="float32", block_size=32, max_model_len=MAX_MODEL_LEN)
        return args.create_engine_config()


@pytest.fixture(scope="session")
def renderer(vllm_config):
    """Return vLLM's renderer."""
    return renderer_from_config(vllm_config)


@pytest.fixture
def stack(vllm_config, renderer):
    """Return D's API server with a scripted engine, a scripted P and a real home."""
    return Stack(vllm_config, renderer)
