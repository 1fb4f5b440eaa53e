"""The worker side: stock NIXL reads, plus two checks.

On D, a reader's note that it has read a ticket is not a request of D's, so it is kept from stock code (which would
log an error). On P, a read that ended after its ticket's deadline counts as failed: D may have given the blocks away
in the meantime.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from server_ext.core.tickets import TICKET_ID_PREFIX
from server_ext.engine import compat

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

logger = compat.init_logger("vllm.bidikv")
_TICKET_NOTE = TICKET_ID_PREFIX.encode()


class Worker(compat.NixlPullConnectorWorker):
    """NIXL's pull worker with tickets."""

    def __init__(self, vllm_config: VllmConfig, engine_id: str, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, engine_id, kv_cache_config)
        get_new_notifs = self.nixl_wrapper.get_new_notifs

        def get_new_notifs_without_tickets() -> dict[Any, list[bytes]]:
            return {
                agent: [note for note in notes if not note.startswith(_TICKET_NOTE)]
                for agent, notes in get_new_notifs().items()
            }

        self.nixl_wrapper.get_new_notifs = get_new_notifs_without_tickets

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
