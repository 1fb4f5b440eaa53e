"""The KV connector that vLLM loads on P and on D: a facade which only delegates.

vLLM builds it twice in every engine, once in the scheduler and once in each worker. By that and by our own role it
holds exactly one of: `decode.DecodeScheduler` (D keeps leases), `prefill.PrefillScheduler` (P reads them), and
`worker.Worker`. Everything else is stock NIXL.

Hooks in call order, scheduler side: `bind_kv_cache_manager` (once), `on_new_request`, `get_num_new_matched_tokens`,
`update_state_after_alloc`, `build_connector_meta`, `update_connector_output`, `request_finished_all_groups`; and from
outside a step: `control`, `on_weight_version`. Worker side: as in stock.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from server_ext.engine import compat
from server_ext.engine.decode import DecodeScheduler
from server_ext.engine.prefill import PrefillScheduler
from server_ext.engine.settings import EngineSettings
from server_ext.engine.worker import Worker

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.kv_cache_interface import KVCacheConfig

    from server_ext.engine.notes import ReadTickets


class BidiKVConnector(compat.NixlPullConnector):
    """NIXL's pull connector, with leases on D and verified reads on P."""

    def __init__(self, vllm_config: VllmConfig, role: compat.KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        """Build one side of the connector.

        Raises:
            ValueError: a setting that bidikv does not know or cannot serve.
            RuntimeError: an unsupported vLLM.
        """
        compat.require_supported_version()
        settings = EngineSettings.from_vllm_config(vllm_config)
        reads = settings.role == "prefill"
        compat.refuse_unsupported(vllm_config, kv_cache_config, reads=reads)
        # Past NixlPullConnector's own constructor, which would build a stock scheduler or worker first.
        compat.NixlBaseConnector.__init__(self, vllm_config, role, kv_cache_config)
        self.connector_scheduler: Any = None
        self.connector_worker: Worker | None = None
        if role == compat.KVConnectorRole.WORKER:
            self.connector_worker = Worker(vllm_config, self.engine_id, kv_cache_config)
        elif reads:
            self.connector_scheduler = PrefillScheduler(vllm_config, self.engine_id, kv_cache_config, settings)
        else:
            self.connector_scheduler = DecodeScheduler(vllm_config, self.engine_id, kv_cache_config, settings)

    def bind_kv_cache_manager(self, kv_cache_manager: KVCacheManager) -> None:
        """Take the scheduler's cache manager, once, at start-up."""
        super().bind_kv_cache_manager(kv_cache_manager)
        if isinstance(self.connector_scheduler, DecodeScheduler):
            self.connector_scheduler.bind_kv_cache_manager(kv_cache_manager)

    def build_connector_worker_meta(self) -> ReadTickets | None:
        """Return what a worker has for the scheduler's side after a step (see `notes`)."""
        return self.connector_worker.build_connector_worker_meta() if self.connector_worker is not None else None

    def control(self, op: str, arg: dict[str, Any]) -> dict[str, Any]:
        """Answer a control call (see `control.dispatch`)."""
        reply: dict[str, Any] = self.connector_scheduler.control(op, arg)
        return reply

    def on_weight_version(self, weight_version: str) -> None:
        """Note that the engine now serves these weights."""
        self.connector_scheduler.on_weight_version(weight_version)
