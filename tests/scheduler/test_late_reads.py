"""P's worker over a NIXL in memory: a read is judged again when it has ended, by the deadline of its ticket."""

import time
from types import SimpleNamespace

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import RemoteMeta, ReqMeta

from server_ext.engine import compat
from server_ext.engine.worker import Worker


class _Nixl:
    """Transfers that have ended well, but for those that are still `under_way`."""

    def __init__(self):
        self.under_way = set()

    def get_new_notifs(self):
        return {}

    def send_notif(self, agent_name, notif_msg):
        pass

    def check_xfer_state(self, handle):
        return "PROC" if handle in self.under_way else "DONE"

    def get_xfer_telemetry(self, handle):
        return None

    def release_xfer_handle(self, handle):
        pass


@pytest.fixture
def worker(monkeypatch):
    """P's worker, of which no engine has been made: what stock code knows of its reads is given by the test."""

    def stock(self, vllm_config, engine_id, kv_cache_config):
        self.engine_id = engine_id
        self.nixl_wrapper = _Nixl()
        self.xfer_stats = SimpleNamespace(record_transfer=lambda telemetry: None)
        self._recving_metadata, self._engine_clock_offset = {}, {}
        self._lease_extension = 20.0

    monkeypatch.setattr(compat.NixlPullConnectorWorker, "__init__", stock)
    return Worker(None, "p", None)


def read(worker, req_id, *, remaining_s, clock_offset_s=0.0):
    """Let a request read a ticket that is over in so many seconds, of a D whose clock is ahead by so many."""
    worker._engine_clock_offset["d"] = clock_offset_s  # noqa: SLF001 (stock code measures it at the handshake)
    expiry_s = time.perf_counter() + clock_offset_s + remaining_s
    remote = RemoteMeta(([7],), "127.0.0.1", 9, "d", f"bidikv-ticket-of-{req_id}", blocks_expiry_time=expiry_s)
    meta = ReqMeta(([1],), ([1],), tp_size=1, remote=remote, awaiting_kvs=True)
    worker._recving_metadata[req_id] = meta  # noqa: SLF001 (stock code puts it there when a read begins)


def ended(worker, *req_ids):
    """Return which reads stock code has to believe, and which have failed."""
    return worker._pop_done_transfers({req_id: [req_id] for req_id in req_ids})  # noqa: SLF001 (the hook itself)


@pytest.mark.parametrize("clock_offset_s", [0.0, 1e6, -1e6], ids=["same clock", "D ahead", "D behind"])
def test_a_read_that_ended_after_its_deadline_has_failed(worker, clock_offset_s):
    """D may have given the blocks away in the meantime: what was read is not used, whichever clock D counts on."""
    read(worker, "late", remaining_s=-0.001, clock_offset_s=clock_offset_s)
    assert ended(worker, "late") == (set(), {"late"})


@pytest.mark.parametrize("clock_offset_s", [0.0, 1e6, -1e6], ids=["same clock", "D ahead", "D behind"])
def test_a_read_that_ended_before_its_deadline_is_believed(worker, clock_offset_s):
    """A read in time is used."""
    read(worker, "early", remaining_s=600.0, clock_offset_s=clock_offset_s)
    assert ended(worker, "early") == ({"early"}, set())


def test_each_read_is_judged_by_its_own_ticket(worker):
    """One late read takes no other one along, and a read that is under way is not judged yet, late or not."""
    read(worker, "early", remaining_s=600.0)
    read(worker, "late", remaining_s=-600.0)
    read(worker, "slow", remaining_s=-600.0)
    worker.nixl_wrapper.under_way = {"slow"}
    assert ended(worker, "early", "late", "slow") == ({"early"}, {"late"})
    worker.nixl_wrapper.under_way = set()
    assert ended(worker, "slow") == (set(), {"slow"})
