"""The worker side: stock NIXL reads, plus two checks.

On D, a reader's note that it has read a ticket goes to the lease table instead of to stock code (`notes`). On P, a read
that ended after its ticket's deadline counts as failed: D may have given the blocks away in the meantime.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from server_ext.engine import compat
from server_ext.engine.notes import ReadTickets, TicketNotes

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

logger = compat.init_logger("vllm.bidikv")


class Worker(compat.NixlPullConnectorWorker):
    """NIXL's pull worker with tickets."""

    def __init__(self, vllm_config: VllmConfig, engine_id: str, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, engine_id, kv_cache_config)
        self._notes = TicketNotes(self.nixl_wrapper.get_new_notifs)
        self.nixl_wrapper.get_new_notifs = self._notes

    def build_connector_worker_meta(self) -> ReadTickets | None:
        """Tell the scheduler's side which tickets were read since the last step; None where none was."""
        return self._notes.take()

    def _pop_done_transfers(self, transfers: dict[str, list[int]]) -> tuple[set[str], set[str]]:
        done, failed = super()._pop_done_transfers(transfers)
        now = time.perf_counter()
        for req_id in done:
            meta = self._recving_metadata.get(req_id)
            expiry = meta.remote.blocks_expiry_time if meta is not None and meta.remote is not None else None
            # D's clock is perf_counter of its engine core; the offset was measured at the handshake.
            if expiry is not None and now >= expiry - self._engine_clock_offset[meta.remote.engine_id]:
                logger.warning("Read of %s ended after its ticket's deadline; its prompt is computed instead.", req_id)
                failed.add(req_id)
        return done - failed, failed
