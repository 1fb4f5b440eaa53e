"""Connectors on a slow link: a read ends no sooner than a link of a given bandwidth would let it.

Only engines of a benchmark load this module (`kv_connector_module_path`), with `kv_connector_extra_config.slow_link`:
`{"bytes_per_s": …, "block_bytes": …}`. The bytes move as fast as this machine can; their reader learns of it later. All
reads of one engine share its link, first come, first served.
"""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.nixl import NixlPullConnector

from bench._link import Link, slow_down
from server_ext.engine.connector import BidiKVConnector


class SlowLinkBidiKVConnector(BidiKVConnector):
    """bidikv's connector, unchanged but for the end of its reads."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        _slow_down(self.connector_worker, vllm_config)


class SlowLinkNixlConnector(NixlPullConnector):  # type: ignore[misc]  # vLLM's names are Any here
    """vLLM's own connector, unchanged but for the end of its reads."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        _slow_down(self.connector_worker, vllm_config)


def _slow_down(worker: Any, vllm_config: Any) -> None:
    if worker is None:  # the scheduler's side
        return
    slow = vllm_config.kv_transfer_config.kv_connector_extra_config["slow_link"]
    block_bytes = int(slow["block_bytes"])

    def num_bytes(read_id: str) -> int:
        meta = worker._recving_metadata.get(read_id)  # noqa: SLF001 - the only place that knows
        return block_bytes * (0 if meta is None else sum(len(group) for group in meta.local_block_ids))

    slow_down(worker, Link(float(slow["bytes_per_s"])), num_bytes)
