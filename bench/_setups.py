"""The engines that a scenario needs: model, memory and link, and how each set of them is started. Starts nothing.

`Setup.pair_configs` and `Setup.aggregated_args` are what `EngineSets` takes. May import `launch` and `_stock`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from bench._link import on_slow_link
from bench._stock import DEFAULT_HOLD_S, stock_config
from bench._stock_arm import METRICS_ARGS
from server_ext.benchmark.arms import ROUTES
from server_ext.launch.command import ROLES, StackConfig, kv_transfer_config
from server_ext.launch.stack import ensure_secret, free_ports

if TYPE_CHECKING:
    from pathlib import Path

    from server_ext.launch.command import Role

BLOCK_SIZE: Final = 32
OURS: Final = "ours"
AGGREGATED: Final = "aggregated"
HOLD_S: Final[dict[str, int | None]] = {
    "stock_bidirectional": None,
    "stock_bidirectional_tuned": 60,  # as long as a lease of ours lives after its turn (`default_ttl_s`)
}
"""Arms on stock pairs, and how long D holds a turn there; None is vLLM's default."""


def hold_s(arm: str) -> int:
    """Return how long the D of a stock arm holds a turn, in seconds."""
    found = HOLD_S[arm]
    return DEFAULT_HOLD_S if found is None else found


def set_of(arm: str) -> str:
    """Return the name of the engines that serve an arm."""
    return OURS if arm in ROUTES else arm


@dataclass(frozen=True, kw_only=True)
class Setup:
    """Engines that some scenarios share.

    - `model`: name of the model.
    - `prefill_tokens`, `decode_tokens`: that the KV cache of P and of D has room for; one engine alone has both.
    - `max_model_len`: longest prompt with its answer; None is the model's own.
    - `link_tokens_per_s`: how many tokens' KV the link moves in a second; None is this machine's own link.
    """

    name: str
    model: str
    prefill_tokens: int = 16_384
    decode_tokens: int = 16_384
    max_model_len: int | None = None
    link_tokens_per_s: float | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the setup as the file has it."""
        return {
            "prefill_tokens": self.prefill_tokens,
            "decode_tokens": self.decode_tokens,
            "max_model_len": self.max_model_len,
            "link_tokens_per_s": self.link_tokens_per_s,
        }

    def pair_configs(self, model: Path, token_bytes: int, folder: Path) -> dict[str, StackConfig]:
        """Return the configuration of each pair of engines, by name.

        Args:
            model: its folder.
            token_bytes: KV bytes of one token.
            folder: for the secret of our pair.
        """
        link = self._link(token_bytes)
        ours = self._config(model, token_bytes, folder)
        configs = {OURS: _with_transfer(ours, link)}
        for name, seconds in HOLD_S.items():
            # Each pair has ports of its own.
            stock = stock_config(
                self._config(model, token_bytes, folder), bidirectional=True, hold_s=seconds, link=link
            )
            decode = (*stock.extra_args.get("decode", ()), *METRICS_ARGS)
            configs[name] = replace(stock, extra_args={**stock.extra_args, "decode": decode})
        return configs

    def aggregated_args(self, token_bytes: int) -> tuple[str, ...]:
        """Return the arguments of the engine that does both: it has the memory of two, and P's larger steps."""
        num_bytes = _pool_bytes(self.prefill_tokens + self.decode_tokens, token_bytes)
        args = ("--kv-cache-memory-bytes", str(num_bytes), "--max-num-batched-tokens", "512")
        return args if self.max_model_len is None else (*args, "--max-model-len", str(self.max_model_len))

    def _config(self, model: Path, token_bytes: int, folder: Path) -> StackConfig:
        prefill, decode = free_ports()
        pools: dict[Role, int] = {"prefill": self.prefill_tokens, "decode": self.decode_tokens}
        memory = {role: ("--kv-cache-memory-bytes", str(_pool_bytes(pools[role], token_bytes))) for role in ROLES}
        return StackConfig(
            model=str(model),
            served_name=self.model,
            prefill=prefill,
            decode=decode,
            secret_file=ensure_secret(folder),
            block_size=BLOCK_SIZE,
            kv_cache_bytes=None,
            max_model_len=self.max_model_len,
            extra_args=memory,
            extra_env={"VLLM_SERVER_DEV_MODE": "1"},
        )

    def _link(self, token_bytes: int) -> dict[str, float] | None:
        if self.link_tokens_per_s is None:
            return None
        return {"bytes_per_s": self.link_tokens_per_s * token_bytes, "block_bytes": BLOCK_SIZE * token_bytes}


def _with_transfer(config: StackConfig, link: dict[str, float] | None) -> StackConfig:
    if link is None:
        return config
    extra_args = {}
    for role in ROLES:
        transfer = json.dumps(on_slow_link(kv_transfer_config(config, role), link))
        extra_args[role] = (*config.extra_args.get(role, ()), "--kv-transfer-config", transfer)
    return replace(config, extra_args=extra_args)


def _pool_bytes(num_tokens: int, token_bytes: int) -> int:
    return (-(-num_tokens // BLOCK_SIZE) + 1) * BLOCK_SIZE * token_bytes  # one more is vLLM's null block
