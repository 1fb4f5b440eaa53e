"""bidikv's connector, which copies out the KV cache of every request that ends.

Only engines load this module (`Plan.connector`); `copies` is the test's end. With the executor `uni` scheduler and
worker live in one process, so the scheduler's side, which knows a request's blocks while it still holds them, can read
what the worker's side was given. A copy is a file `<role>/<number>.npz` in the folder that BIDIKV_COPIES names:
`token_ids` [num_tokens], those whose KV is written, and `kv` [layer, key or value, num_tokens, head, dimension].
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np

from server_ext.engine.connector import BidiKVConnector
from server_ext.engine.decode import num_tokens_in_cache

_caches: dict[str, Any] = {}


class CopyingConnector(BidiKVConnector):
    """bidikv's connector, unchanged but for the copies."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        name = vllm_config.kv_transfer_config.kv_connector_extra_config["bidikv"]["role"]
        self._folder = Path(os.environ["BIDIKV_COPIES"]) / name
        self._num_copies = 0

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Keep the worker's tensors."""
        super().register_kv_caches(kv_caches)
        _caches.update(kv_caches)

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> Any:
        """Copy what the request's blocks hold, while they are its own."""
        num_tokens = num_tokens_in_cache(request)
        if num_tokens:
            ids = np.array(request.all_token_ids[:num_tokens], np.int32)
            kv = np.stack([_kv_of(cache, list(block_ids[0]), num_tokens) for cache in _caches.values()])
            self._num_copies += 1
            unfinished = self._folder / "unfinished"
            with unfinished.open("wb") as file:
                np.savez(file, token_ids=ids, kv=kv)
            unfinished.rename(self._folder / f"{self._num_copies}.npz")
        return super().request_finished_all_groups(request, block_ids)


def _kv_of(cache: Any, block_ids: list[int], num_tokens: int) -> Any:
    """Return keys and values [2, num_tokens, head, dimension] of some blocks of one layer.

    vLLM's CPU attention keeps a block of a head as its keys, a column a token, and then its values, a row a token.
    """
    num_heads, block_size, width = cache.shape[1:]
    blocks = cache[block_ids[: -(-num_tokens // block_size)]].reshape(-1, num_heads, 2, block_size * width // 2)
    keys = blocks[:, :, 0].reshape(-1, num_heads, width // 2, block_size).permute(0, 3, 1, 2)
    values = blocks[:, :, 1].reshape(-1, num_heads, block_size, width // 2).permute(0, 2, 1, 3)
    return np.stack([half.reshape(-1, num_heads, width // 2)[:num_tokens].numpy() for half in (keys, values)])
