"""What the KV cache of an engine depends on, besides the tokens: the same for P and D, or nothing is shared."""

from __future__ import annotations

from typing import TYPE_CHECKING

from server_ext.engine import compat

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class Identity:
    """The model and the weights that an engine serves.

    - `weight_version`: EngineCore's own name of its weights; a weight update changes it.
    """

    def __init__(self, vllm_config: VllmConfig) -> None:
        self._model = compat.model_fingerprint(vllm_config)
        self.weight_version = "default"  # EngineCore's initial value

    @property
    def fingerprint(self) -> str:
        """Equal on two engines where a block of one is valid on the other (adapters are refused at start-up)."""
        return f"{self._model}/{self.weight_version}"
