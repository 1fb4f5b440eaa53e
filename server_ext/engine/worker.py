"""The worker side: stock NIXL reads, plus three checks.

On D, a reader's note that it has read a ticket goes to the lease table instead of to stock code (`notes`). On both, a
read that ended when the other side may have given the blocks away counts as failed, and the prompt is computed: on P
that is after its ticket's deadline, on D after P's hold (`holds`). And a P that stood still lets go of nothing before
it has had time to read that D still waits for it.
"""

from __future__ import annotations

import time
from itertools import chain
from typing import TYPE_CHECKING, Any

from server_ext.core.tickets import TICKET_ID_PREFIX
from server_ext.engine import compat
from server_ext.engine.holds import Holds
from server_ext.engine.notes import ReadTickets, TicketNotes

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

logger = compat.init_logger("vllm.bidikv")
_HEARTBEAT = b"HB:"  # and the names of the requests that D waits for, with commas


class Worker(compat.NixlPullConnectorWorker):
    """NIXL's pull worker with tickets."""

    def __init__(self, vllm_config: VllmConfig, engine_id: str, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, engine_id, kv_cache_config)
        self._notes = TicketNotes(self.nixl_wrapper.get_new_notifs)
        self.nixl_wrapper.get_new_notifs = self._notes
        self._holds = Holds(self._lease_extension)
        self._send_note = self.nixl_wrapper.send_notif
        self.nixl_wrapper.send_notif = self._send_and_list
        self._heard_of: list[str] = []
        self._reaped_s = time.perf_counter()
        self._graced: dict[str, float] = {}

    def build_connector_worker_meta(self) -> ReadTickets | None:
        """Tell the scheduler's side which tickets were read since the last step; None where none was."""
        return self._notes.take()

    def _nixl_handshake(self, host: str, port: int, remote_tp_size: int, expected_engine_id: str, *args: Any) -> Any:
        started_s = time.perf_counter()
        agents, offset_s = super()._nixl_handshake(host, port, remote_tp_size, expected_engine_id, *args)
        # Stock takes the other clock's reading for one of the middle of the round trip. Where this process stood still
        # in it, that is half the pause too late; now the other engine's deadlines are early by what it took, at most.
        offset_s += (time.perf_counter() - started_s) / 2
        # Stock sets this after it has let reads of that engine begin.
        self._engine_clock_offset[expected_engine_id] = offset_s
        return agents, offset_s

    def _send_and_list(self, agent_name: str, notif_msg: bytes) -> None:
        self._send_note(agent_name, notif_msg=notif_msg)
        if notif_msg.startswith(_HEARTBEAT):
            self._heard_of += notif_msg.removeprefix(_HEARTBEAT).decode().split(",")

    def _send_heartbeats(self, metadata: Any) -> None:
        self._heard_of, now_s = [], time.perf_counter()
        super()._send_heartbeats(metadata)  # also goes on where one cannot be sent
        if metadata.heartbeat_by_engine:
            waited_for = chain.from_iterable(info.req_ids for info in metadata.heartbeat_by_engine.values())
            self._holds.sent(self._heard_of, waited_for=waited_for, now_s=now_s)

    def _reap_expired_send_leases(self, done_sending: set[str]) -> None:
        now_s = time.perf_counter()
        if now_s - self._reaped_s > self._holds.margin_s:
            # Stopped, idle, or in a long step: D's heartbeats of that time may be on their last meters. A grace that
            # no heartbeat has made longer is not given again.
            grace_end_s = now_s + self._holds.margin_s
            graced, self._graced = self._graced, {}
            for req_id, end_s in self._reqs_to_send.items():
                if end_s == graced.get(req_id):
                    self._graced[req_id] = end_s
                elif end_s < grace_end_s:
                    self._graced[req_id] = self._reqs_to_send[req_id] = grace_end_s
        self._reaped_s = now_s
        super()._reap_expired_send_leases(done_sending)

    def _pop_done_transfers(self, transfers: dict[str, list[int]]) -> tuple[set[str], set[str]]:
        done, failed = super()._pop_done_transfers(transfers)
        now_s = time.perf_counter()
        for req_id in done - failed:
            meta = self._recving_metadata.get(req_id)
            if meta is not None and meta.remote is not None and self._is_late(meta.remote, now_s=now_s):
                logger.warning("Read of %s ended too late to be relied on; its prompt is computed instead.", req_id)
                failed.add(req_id)
        return done - failed, failed

    def _is_late(self, remote: Any, *, now_s: float) -> bool:
        """Tell whether blocks that have been read by now may have been given away before."""
        if remote.blocks_expiry_time is None:
            return False
        # The other clock is perf_counter of that engine's core; the offset was measured at the handshake.
        end_s = remote.blocks_expiry_time - self._engine_clock_offset[remote.engine_id]
        if remote.request_id.startswith(TICKET_ID_PREFIX):
            return now_s >= end_s  # D keeps them for a grace beyond that
        return self._holds.is_over(remote.request_id, end_s, now_s=now_s)
