"""Schedulers of P and D with our connector."""

import warnings
from pathlib import Path

import pytest

from server_ext.launch.tiny import ensure_tiny

with warnings.catch_warnings():
    # Warnings are errors, but what torch and vLLM say while they are imported is not ours to mend.
    warnings.simplefilter("ignore")
    from .harness import Harness, engine_config


@pytest.fixture(scope="session")
def model() -> Path:
    """Folder of the tiny model; only its configuration is read here."""
    return Path(ensure_tiny())


@pytest.fixture
def make_harness(model, tmp_path, monkeypatch):
    """Return a function that builds a scheduler for a role."""
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")

    def make(role: str, *, num_blocks: int, is_async: bool = False, num_spec_tokens: int = 0, **settings) -> Harness:
        config = engine_config(model, tmp_path / "secret", role, **settings)
        return Harness(config, num_blocks=num_blocks, is_async=is_async, num_spec_tokens=num_spec_tokens)

    return make
