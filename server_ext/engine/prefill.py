"""P's scheduler side: read a leased prefix from D, once, and only what is proven to match.

Stock vLLM asks again for a read that failed or was preempted, and then waits for it for ever. Here the second
question is answered "nothing external", so P computes. Before the first read a ticket must be signed, cover exactly
the blocks of a prefix of this very prompt and be early enough.

Order of hooks for each request: `on_new_request`, `get_num_new_matched_tokens` (again after a failed read or a
preemption), `update_state_after_alloc`, `update_connector_output`, `request_finished`.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from server_ext.core import metrics
from server_ext.core.tickets import REFUSAL_REASONS, check_ticket, verify
from server_ext.engine import compat
from server_ext.engine.identity import Identity

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput

    from server_ext.core.tickets import Refusal
    from server_ext.engine.settings import EngineSettings

logger = compat.init_logger("vllm.bidikv")

# Tickets live for a minute or so; this many remembered ids outlast them at a thousand turns a second.
_MAX_SEEN_TICKETS = 100_000
# Stock NIXL declines a read this long before its deadline, for the error of the clock offset and the read itself.
_EXPIRY_MARGIN_S = 5.0


@dataclass(slots=True)
class Read:
    """What became of one request's prompt: the report that goes back to the conductor."""

    arrival_s: float
    fingerprint: str
    ttl_s: float | None = None
    reason: str | None = None
    refusal: str | None = None
    local_tokens: int = 0
    fetched_tokens: int = 0
    started_s: float | None = None
    fetch_s: float | None = None

    def is_late(self, now_s: float) -> bool:
        """Tell whether the ticket is too old to begin a read, or to have begun one that failed."""
        return self.ttl_s is not None and now_s - self.arrival_s + _EXPIRY_MARGIN_S >= self.ttl_s

    def to_json(self, now_s: float) -> dict[str, Any]:
        """Return the report.

        Token counts are of the prompt; `fetch_s` is how long the read took and `read_age_s` how long ago it ended, both
        in seconds and None where nothing was fetched. `refusal` says what was wrong with the ticket; `reason` is the
        wire's word for it, and for whatever else kept the ticket from being used.
        """
        return {
            "local_tokens": self.local_tokens,
            "fetched_tokens": self.fetched_tokens,
            "fetch_s": self.fetch_s if self.fetched_tokens else None,
            "read_age_s": self._read_age_s(now_s),
            "reason": self.reason,
            "refusal": self.refusal,
        }

    def _read_age_s(self, now_s: float) -> float | None:
        if not self.fetched_tokens or self.started_s is None or self.fetch_s is None:
            return None
        return now_s - self.started_s - self.fetch_s


class PrefillScheduler(compat.NixlPullConnectorScheduler):
    """NIXL's pull scheduler on P, reading tickets."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        engine_id: str,
        kv_cache_config: KVCacheConfig,
        settings: EngineSettings,
    ) -> None:
        super().__init__(vllm_config, engine_id, kv_cache_config)
        self.identity = Identity(vllm_config)
        self._secret = settings.secret
        self._reads: dict[str, Read] = {}
        self._seen_tickets: OrderedDict[str, None] = OrderedDict()
        self._forged: set[str] = set()
        self._counts = metrics.Counts()

    def on_new_request(self, request: compat.Request) -> None:
        """Take the ticket, or drop it with its reason; nothing of what is not signed is used."""
        given = request.kv_transfer_params
        params = request.kv_transfer_params = verify(given, self._secret)
        if params is None and given is not None:
            self._count_refusal(request, "forged")
            self._forged.add(request.request_id)
        elif params is not None:
            read = self._reads[request.request_id] = Read(time.perf_counter(), self.identity.fingerprint)
            if params.get("remote_block_ids"):
                self._take_ticket(request, params, read)
        super().on_new_request(request)

    def _take_ticket(self, request: compat.Request, params: dict[str, Any], read: Read) -> None:
        refusal = check_ticket(
            params,
            prompt_ids=request.prompt_token_ids or [],
            fingerprint=self.identity.fingerprint,
            block_size=self.block_size,
            seen_ids=self._seen_tickets,
        )
        if refusal is not None:
            self._refuse(request, read, refusal)
            return
        read.ttl_s = params["bidikv_ttl_s"]
        self._seen_tickets[params["remote_request_id"]] = None
        if len(self._seen_tickets) > _MAX_SEEN_TICKETS:
            self._seen_tickets.popitem(last=False)

    def _refuse(self, request: compat.Request, read: Read, refusal: Refusal) -> None:
        self._count_refusal(request, refusal)
        read.reason, read.refusal = REFUSAL_REASONS[refusal], refusal
        request.kv_transfer_params["remote_block_ids"] = None

    def _count_refusal(self, request: compat.Request, refusal: Refusal) -> None:
        logger.warning("Ticket of %s refused: %s; its prompt is computed instead.", request.request_id, refusal)
        self._counts.add(metrics.TICKETS_REFUSED, refusal)

    def get_num_new_matched_tokens(self, request: compat.Request, num_computed_tokens: int) -> tuple[int, bool]:
        """Offer the ticket's tokens beyond P's own prefix, but never twice."""
        read = self._reads.get(request.request_id)
        if read is None:
            return super().get_num_new_matched_tokens(request, num_computed_tokens)
        params = request.kv_transfer_params
        read.local_tokens = num_computed_tokens
        if params.get("_remote_blocks_processed"):
            if read.fetched_tokens:
                read.reason = "ticket_late" if read.is_late(time.perf_counter()) else "read_failed"
                read.fetched_tokens = 0
            return 0, False
        if params.get("remote_block_ids"):
            read.reason = None
            if (refusal := self._why_not_any_more(read)) is not None:
                self._refuse(request, read, refusal)
        num_tokens, is_async = super().get_num_new_matched_tokens(request, num_computed_tokens)
        if not num_tokens and read.reason is None and params.get("remote_block_ids"):
            # Stock's threshold, or P's own prefix already covers the ticket.
            covered = num_computed_tokens >= params["remote_num_tokens"]
            read.reason = None if covered else "below_threshold"
        return num_tokens, is_async

    def _why_not_any_more(self, read: Read) -> Refusal | None:
        if read.fingerprint != self.identity.fingerprint:
            return "wrong_fingerprint"
        return "ticket_late" if read.is_late(time.perf_counter()) else None

    def update_state_after_alloc(
        self, request: compat.Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        """Note the beginning of a read."""
        read = self._reads.get(request.request_id)
        if read is not None and num_external_tokens:
            read.fetched_tokens = num_external_tokens
            read.started_s = time.perf_counter()
        super().update_state_after_alloc(request, blocks, num_external_tokens)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Note the end of reads."""
        for req_id in connector_output.finished_recving or ():
            read = self._reads.get(req_id)
            if read is not None and read.started_s is not None:
                read.fetch_s = time.perf_counter() - read.started_s
        super().update_connector_output(connector_output)

    def request_finished(
        self, request: compat.Request, block_ids: tuple[Sequence[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Send the report along with vLLM's own parameters for the decode side, and until when the blocks are kept."""
        read = self._reads.pop(request.request_id, None)
        delay_free, params = super().request_finished(request, block_ids)
        if request.request_id in self._forged:
            # Nothing is kept for whoever made that up; but D, if it was one, shall know why.
            self._forged.discard(request.request_id)
            params = {"bidikv": {"reason": REFUSAL_REASONS["forged"], "refusal": "forged"}}
        if read is not None and params is not None:
            params["bidikv"] = {
                **read.to_json(time.perf_counter()),
                # Of nobody where new weights came in the middle.
                "fingerprint": self.identity.fingerprint if read.fingerprint == self.identity.fingerprint else "",
                "hold_s": self._kv_lease_duration,
            }
            # Stock says so on D only. Without it D would not know a read that came too late (`holds`).
            params["remote_blocks_expiry_time"] = self._reqs_need_send.get(request.request_id)
        return delay_free, params

    def on_weight_version(self, weight_version: str) -> None:
        """Read only what these weights have computed from now on."""
        self.identity.weight_version = weight_version

    def control(self, op: str, arg: dict[str, Any]) -> dict[str, Any]:  # noqa: ARG002 - the channel's signature
        """Return what `metrics` of a home returns; refuse all else, as P keeps no sessions."""
        if op == "metrics":
            return {"metrics": self._counts.snapshot(metrics.READER)}
        msg = f"this engine is a prefill node and has no op {op!r}; sessions live on decode nodes"
        return {"error": {"code": "engine_unavailable", "message": msg}}
