"""D's scheduler side: the home of sessions lives here, on the scheduler's thread.

A request of a turn is known by its nonce, which only the conductor can pass (`Request.session_id`); everything else
that a client can send reaches no lease. When such a request ends, its blocks are pinned provisionally before vLLM
drops its own references; `settle` makes the pin a lease. Live requests win: an allocation that fails takes blocks
back from leases first.

Order of hooks: `bind_kv_cache_manager`, then for each request `on_new_request` … `request_finished`; `control` between
steps.
"""

from __future__ import annotations

import secrets
import time
from typing import TYPE_CHECKING, Any

from bidikv_sdk.prefix import num_blocks
from server_ext.core.home import Home
from server_ext.core.rates import ConstantRates, LearnedRates
from server_ext.core.steps import StepWatch
from server_ext.core.tickets import verify
from server_ext.engine import compat
from server_ext.engine.identity import Identity
from server_ext.engine.notes import ReadTickets
from server_ext.engine.pins import BlockPoolPins

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput

    from server_ext.engine.settings import EngineSettings

logger = compat.init_logger("vllm.bidikv")

# An abort is how the engine sees a stop string and an early close; the conductor knows which it was and settles.
_LEASABLE = frozenset(
    {
        compat.RequestStatus.FINISHED_STOPPED,
        compat.RequestStatus.FINISHED_LENGTH_CAPPED,
        compat.RequestStatus.FINISHED_ABORTED,
    }
)


class DecodeScheduler(compat.NixlPullConnectorScheduler):
    """NIXL's pull scheduler on D, plus the home of D's sessions."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        engine_id: str,
        kv_cache_config: KVCacheConfig,
        settings: EngineSettings,
    ) -> None:
        super().__init__(vllm_config, engine_id, kv_cache_config)
        self.identity = Identity(vllm_config)
        self._settings = settings
        (group,) = kv_cache_config.kv_cache_groups
        self._block_bytes = len(group.layer_names) * group.kv_cache_spec.page_size_bytes
        self._max_request_blocks = num_blocks(vllm_config.model_config.max_model_len, self.block_size)
        self.rates = LearnedRates(ConstantRates(attention_tokens=compat.attention_tokens(vllm_config)))
        self._steps = StepWatch(self.rates)
        self._home: Home

    def bind_kv_cache_manager(self, manager: KVCacheManager) -> None:
        """Build the home over the engine's block pool, and put the guard around its allocations."""
        self._home = Home(
            BlockPoolPins(manager.block_pool),
            self._settings.home,
            block_size=self.block_size,
            block_bytes=self._block_bytes,
            max_request_blocks=self._max_request_blocks,
            incarnation=self.engine_id,
            secret=self._settings.secret,
            make_address=self._address,
            new_nonce=lambda: secrets.token_urlsafe(16),
            rates=self.rates,
            count_running=self._steps.count_running,
        )
        compat.guard_allocations(manager, self._make_room, self._before_reset)

    # Requests

    def on_new_request(self, request: compat.Request) -> None:
        """Ignore transfer parameters that no holder of the secret has signed."""
        request.kv_transfer_params = verify(request.kv_transfer_params, self._settings.secret)
        super().on_new_request(request)

    def get_num_new_matched_tokens(self, request: compat.Request, num_computed_tokens: int) -> tuple[int, bool]:
        """Take nothing from P that other weights have computed: new ones may have come since the turn began."""
        params = request.kv_transfer_params
        if params is not None and params.get("bidikv_fingerprint") != self.identity.fingerprint:
            return 0, False  # vLLM then tells P that its blocks are not needed
        return super().get_num_new_matched_tokens(request, num_computed_tokens)

    def request_finished(
        self, request: compat.Request, block_ids: tuple[Sequence[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Pin a finished turn's blocks provisionally, before vLLM frees them."""
        self._steps.finished(request.request_id)
        nonce = request.session_id
        if nonce is not None and self._home.leases.is_open(nonce) and request.status in _LEASABLE:
            self._home.leases.finish(
                nonce, block_ids[0], num_tokens_in_cache(request), request.all_token_ids, now_s=time.perf_counter()
            )
        delay_free, params = super().request_finished(request, block_ids)
        return delay_free, params

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> Any:
        """Reclaim what is due, once a step; between steps every control call does."""
        now_s = time.perf_counter()
        self._steps.scheduled(scheduler_output.num_scheduled_tokens, now_s=now_s)
        self._home.sweep(now_s=now_s)
        return super().build_connector_meta(scheduler_output)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Take back the tickets whose readers say that they are done."""
        read = connector_output.kv_connector_worker_meta
        if isinstance(read, ReadTickets):
            for ticket_id in read.ticket_ids:
                self._home.return_ticket(ticket_id=ticket_id, now_s=time.perf_counter())
        super().update_connector_output(connector_output)

    # Memory

    def _make_room(self, num_missing: int) -> bool:
        # All or nothing: a request that revoking cannot help must not cost sessions their leases.
        return self._home.leases.revoke(num_missing, now_s=time.perf_counter(), all_or_nothing=True) > 0

    def _before_reset(self) -> bool:
        now_s = time.perf_counter()
        if self._home.leases.has_tickets(now_s=now_s):
            # vLLM resets only a pool in which nothing is held, and what P may be reading cannot be taken back.
            logger.warning("Prefix cache not reset: P is reading leased blocks; try again in a few seconds.")
            return False
        self._home.leases.release_all("reset", now_s=now_s)
        return True

    def on_weight_version(self, weight_version: str) -> None:
        """Give back all that other weights have computed: no turn will ever match it again.

        What P is reading at this moment stays under its tickets, whose fingerprint P checks by itself.
        """
        if weight_version != self.identity.weight_version:
            self.identity.weight_version = weight_version
            self._home.leases.release_all("model_changed", now_s=time.perf_counter())

    # Control channel

    def control(self, op: str, arg: dict[str, Any]) -> dict[str, Any]:
        """Answer one control call of an API server process.

        Args:
            op: an op of `Home.handle`.
            arg: its argument, but for the fingerprint of a turn, which only the engine knows.

        Returns:
            The op's reply, or `{"error": {...}}`; a turn's begin also says the `fingerprint` that P must have.
        """
        identity = {"fingerprint": self.identity.fingerprint} if op == "begin" else {}
        return self._home.handle(op, {**arg, **identity}, now_s=time.perf_counter()) | identity

    def _address(self, deadline_s: float) -> dict[str, Any]:
        """Return how to reach this engine, in vLLM's own transfer parameters.

        The deadline goes out as perf_counter of this process, the one clock reading on our wire that is not a
        remaining time: stock readers rebase it by an offset measured at the handshake.
        """
        parallel = self.vllm_config.parallel_config
        return {
            "remote_engine_id": self.engine_id,
            "remote_host": self.side_channel_host,
            "remote_port": self.side_channel_port,
            "remote_blocks_expiry_time": deadline_s,
            "bidikv_ttl_s": self._settings.home.ticket_ttl_s,
            "tp_size": self.transfer_tp_size,
            "dcp_size": parallel.decode_context_parallel_size,
            "pp_size": parallel.pipeline_parallel_size,
            "transfer_mode": self._TRANSFER_MODE,
        }


def num_tokens_in_cache(request: compat.Request) -> int:
    """Return for how many tokens of a finished request the KV cache certainly holds values.

    `num_computed_tokens` counts steps that are still in flight (async scheduling) and is set ahead while a load is
    pending, hence: without an output token nothing is certain, and in-flight tokens are not there yet.
    """
    if request.num_output_tokens == 0:
        return 0
    certain = request.num_computed_tokens - request.num_in_flight_tokens
    return int(min(max(certain, 0), request.num_tokens))
