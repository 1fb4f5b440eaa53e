"""The limit model: what a prompt costs where nothing waits, computed or fetched.

With N prompt tokens of which H are there already: computing takes `(2 P n + 2 L A (N^2 - H^2)) / F` seconds for
the n = N - H new ones (P active parameters, L layers, A attention width, F FLOP/s), fetching takes
`c + k H / B`. Not modelled: queueing, chunked prefill, the way of the new KV from P to D, routers; all of them
make a real ratio smaller. Functions take numbers or numpy arrays alike.
"""

import math
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from .hardware import EFFICIENCY, FIXED_S, GPU_MEMORY_SHARE, Gpu, Link, Model

Tokens: TypeAlias = Any
"""A number of tokens, or a numpy array of them."""

# Weights should leave room for caches: an engine takes GPUs until they fill no more than this of it.
_MAX_WEIGHT_SHARE: Final = 0.6


@dataclass(frozen=True, slots=True)
class Limits:
    """A model on an engine's GPUs, and the link between two engines."""

    model: Model
    gpu: Gpu
    link: Link
    fixed_s: float = FIXED_S
    efficiency: float = EFFICIENCY
    engine_gpus: int | None = None
    """None: see `num_gpus`."""
    memory_share: float = GPU_MEMORY_SHARE
    """Part of the memory that an engine takes."""

    @property
    def is_measured(self) -> bool:
        """Whether these are measured rates: then nothing can be said of other models on this hardware."""
        return self.engine_gpus is not None

    @property
    def hardware(self) -> str:
        """What this is of, in words."""
        if self.is_measured:
            return "engines and a link as measured"
        return f"{self.num_gpus} x {self.gpu.name} per engine, {self.link.name} link"

    @property
    def num_gpus(self) -> int:
        """GPUs of one engine, if not given: the smallest power of two whose memory the weights fill to at most 60 %."""
        if self.engine_gpus is not None:
            return self.engine_gpus
        num_gpus = 1
        while self.model.weight_bytes > _MAX_WEIGHT_SHARE * num_gpus * self.gpu.memory_bytes:
            num_gpus *= 2
        return num_gpus

    @property
    def flops(self) -> float:
        """Effective FLOP/s of an engine's prefill."""
        return self.num_gpus * self.gpu.peak_flops * self.efficiency

    @property
    def pool_bytes(self) -> float:
        """Bytes of KV cache on one engine: its GPUs' memory without the weights."""
        return self.num_gpus * self.gpu.memory_bytes * self.memory_share - self.model.weight_bytes

    @property
    def pool_tokens(self) -> int:
        """Tokens whose KV fits on one engine."""
        return int(self.pool_bytes / self.model.kv_bytes_per_token)

    @property
    def linear_s_per_token(self) -> float:
        """Seconds that a token costs to compute, attention aside."""
        return 2 * self.model.num_active_params / self.flops

    @property
    def attention_tokens(self) -> float:
        """Length at which attention costs as much as all else."""
        return self.model.attention_tokens

    @property
    def fetch_s_per_token(self) -> float:
        """Seconds that a token costs to fetch, the fixed cost aside."""
        return self.model.kv_bytes_per_token / self.link.bytes_per_s

    @property
    def decode_s_per_token(self) -> float:
        """Seconds of an output token alone on an engine: its weights read once. For logs without end times."""
        active_share = min(1.0, self.model.num_active_params * 2 / self.model.weight_bytes)
        return self.model.weight_bytes * active_share / (self.num_gpus * self.gpu.memory_bytes_per_s)

    def compute_s(self, num_tokens: Tokens, num_present: Tokens = 0) -> Tokens:
        """Return the seconds to compute a prompt of `num_tokens`, the first `num_present` of which are there."""
        attention = (num_tokens * num_tokens - num_present * num_present) / self.attention_tokens
        return self.linear_s_per_token * (num_tokens - num_present + attention)

    def fetch_s(self, num_tokens: Tokens) -> Tokens:
        """Return the seconds to fetch the KV of `num_tokens` > 0."""
        return self.fixed_s + self.fetch_s_per_token * num_tokens

    @property
    def break_even_tokens(self) -> float:
        """History length from which fetching beats computing: where `fetch_s(H) == compute_s(H)`.

        Attention grows with the square, so there always is one; behind the model's context it is no use.
        """
        square = self.linear_s_per_token / self.attention_tokens
        linear = self.linear_s_per_token - self.fetch_s_per_token
        root = math.sqrt(linear * linear + 4 * square * self.fixed_s)
        # Of the two forms of the root, each is exact where the other cancels.
        return 2 * self.fixed_s / (linear + root) if linear > 0 else (root - linear) / (2 * square)
