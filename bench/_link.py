"""A link that is slow on purpose: when reads are through, and a worker that learns of it then. Pure."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping


class Link:
    """When reads are through, on a link that serves one after the other. Pure.

    * **bytes_per_s** - its bandwidth.
    """

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._free_s = 0.0
        self._due_s: dict[str, float] = {}

    def is_through(self, read_id: str, num_bytes: int, *, now_s: float) -> bool:
        """Tell whether a read would be through; it was posted when this was first asked."""
        if read_id not in self._due_s:
            self._free_s = max(self._free_s, now_s) + num_bytes / self._bytes_per_s
            self._due_s[read_id] = self._free_s
        return now_s >= self._due_s[read_id]

    def forget(self, read_ids: Iterable[str]) -> None:
        """Drop reads that have ended."""
        for read_id in read_ids:
            self._due_s.pop(read_id, None)


def on_slow_link(transfer: dict[str, Any], link: Mapping[str, float] | None) -> dict[str, Any]:
    """Return a `--kv-transfer-config` whose connector reads over a slow link (see `slow_link`).

    Args:
        transfer: of our connector, or of vLLM's own.
        link: `bytes_per_s`, and `block_bytes` of one KV block in all layers; None for this machine's own.
    """
    if link is None:
        return transfer
    extra = {**transfer["kv_connector_extra_config"], "slow_link": dict(link)}
    return {
        **transfer,
        "kv_connector": f"SlowLink{transfer['kv_connector']}",
        "kv_connector_module_path": "bench.slow_link",
        "kv_connector_extra_config": extra,
    }


def slow_down(
    worker: Any, link: Link, num_bytes: Callable[[str], int], now_s: Callable[[], float] = time.monotonic
) -> None:
    """Let a worker see the end of its reads when a link would be through with them."""
    pop = worker._pop_done_transfers  # noqa: SLF001 - the only hook there

    def pop_done_transfers(transfers: dict[str, list[int]]) -> Any:
        through = {
            read_id: handles
            for read_id, handles in transfers.items()
            if link.is_through(read_id, num_bytes(read_id), now_s=now_s())
        }
        looked_at = list(through)
        done, failed = pop(through)
        for read_id in looked_at:
            del transfers[read_id]
        transfers.update(through)  # what is still in progress
        link.forget(done | failed)
        return done, failed

    worker._pop_done_transfers = pop_done_transfers  # noqa: SLF001
