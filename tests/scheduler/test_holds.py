"""Until when D may rely on what it reads from P: P's hold, and the heartbeats that have moved its end."""
# ruff: noqa: SLF001 - vLLM's worker has no other hooks than these

from contextlib import suppress
from types import SimpleNamespace

import pytest

from server_ext.engine import compat
from server_ext.engine.holds import Holds
from server_ext.engine.worker import Worker

HOLD_S, EXTENSION_S, MARGIN_S = 30.0, 20.0, 5.0


@pytest.fixture
def holds():
    """As with vLLM's default of 30 s."""
    return Holds(EXTENSION_S)


def heard(holds, *request_ids, now_s):
    """Let heartbeats for all that D waits for go out."""
    holds.sent(request_ids, waited_for=request_ids, now_s=now_s)


def test_without_heartbeats_it_is_over_a_margin_before_p_says(holds):
    """The clocks are compared once, at the handshake, and not to the millisecond."""
    assert not holds.is_over("p-1", HOLD_S, now_s=HOLD_S - MARGIN_S - 0.01)
    assert holds.is_over("p-1", HOLD_S, now_s=HOLD_S - MARGIN_S)


def test_heartbeats_keep_it_as_long_as_they_go_out(holds):
    """A turn may wait in D's queue for minutes: P gives nothing away while D says that it waits."""
    for now_s in range(0, 300, 5):
        heard(holds, "p-1", "p-2", now_s=now_s)
        assert not holds.is_over("p-1", HOLD_S, now_s=now_s + 4.9)
    last_s = 295.0
    assert not holds.is_over("p-1", HOLD_S, now_s=last_s + EXTENSION_S - MARGIN_S - 0.01)
    assert holds.is_over("p-1", HOLD_S, now_s=last_s + EXTENSION_S - MARGIN_S)


def test_a_heartbeat_that_may_have_come_too_late_moves_nothing(holds):
    """What is over stays over, however many heartbeats follow."""
    for now_s in (HOLD_S - MARGIN_S + 0.01, HOLD_S, HOLD_S + 5):
        heard(holds, "p-1", now_s=now_s)
    assert holds.is_over("p-1", HOLD_S, now_s=HOLD_S + 5)


def test_a_pause_ends_it_for_good(holds):
    """D stood still: P may have let go in the meantime, and later heartbeats are of no use."""
    heard(holds, "p-1", now_s=20.0)
    assert not holds.is_over("p-1", HOLD_S, now_s=34.9)
    heard(holds, "p-1", now_s=36.0)
    assert holds.is_over("p-1", HOLD_S, now_s=36.1)


def test_a_heartbeat_is_for_those_that_it_names(holds):
    """And what none names any more is forgotten: nothing piles up."""
    heard(holds, "p-1", now_s=20.0)
    assert holds.is_over("p-2", HOLD_S, now_s=26.0)
    heard(holds, "p-2", now_s=21.0)
    assert holds.is_over("p-1", HOLD_S, now_s=26.0)
    assert not holds.is_over("p-2", HOLD_S, now_s=26.0)


def test_a_heartbeat_that_did_not_go_out_is_none(holds):
    """It is missing, and those before it still count."""
    heard(holds, "p-1", now_s=20.0)
    holds.sent([], waited_for=["p-1"], now_s=25.0)
    assert not holds.is_over("p-1", HOLD_S, now_s=34.9)
    assert holds.is_over("p-1", HOLD_S, now_s=35.0)


class Remote:
    """The other side of a read, as vLLM's metadata has it."""

    def __init__(self, request_id, blocks_expiry_time):
        self.engine_id, self.request_id, self.blocks_expiry_time = "p", request_id, blocks_expiry_time


def send_note(worker, agent_name, *, notif_msg):
    """Stand in for NIXL: fails where the way is cut."""
    if worker.is_cut:
        raise ConnectionError
    worker.sent.append((agent_name, notif_msg))


def send_heartbeats(worker, metadata):
    """As stock code: none without a handshake, and what cannot be sent is passed over."""
    for engine_id, waited_for in metadata.heartbeat_by_engine.items():
        for agent_name in worker._remote_agents.get(engine_id, ()):
            with suppress(ConnectionError):
                worker.nixl_wrapper.send_notif(agent_name, notif_msg=("HB:" + ",".join(waited_for.req_ids)).encode())


@pytest.fixture
def worker(monkeypatch):
    """Our worker without an engine: stock code does nothing, and the clock stands still."""
    worker = object.__new__(Worker)
    worker.now_s = 1000.0
    monkeypatch.setattr("server_ext.engine.worker.time.perf_counter", lambda: worker.now_s)
    stock = compat.NixlPullConnectorWorker
    monkeypatch.setattr(stock, "_pop_done_transfers", lambda _, transfers: (set(transfers), set()))
    monkeypatch.setattr(stock, "_send_heartbeats", send_heartbeats)
    monkeypatch.setattr(stock, "_reap_expired_send_leases", lambda *_: None)
    worker._holds, worker._reaped_s, worker._graced = Holds(EXTENSION_S), worker.now_s, {}
    worker.nixl_wrapper = SimpleNamespace(send_notif=worker._send_and_list)
    worker.sent, worker.is_cut = [], False
    worker._send_note = send_note.__get__(worker)
    worker._engine_clock_offset = {"p": 500.0}
    worker._remote_agents = {"p": ["p's agent"]}
    worker._reqs_to_send, worker._recving_metadata = {}, {}
    return worker


def read(worker, remote):
    """Let a read be done; tell whether it counts."""
    worker._recving_metadata["r"] = SimpleNamespace(remote=remote)
    done, failed = worker._pop_done_transfers({"r": []})
    assert done | failed == {"r"}
    return bool(done)


def test_a_read_after_the_hold_is_failed(worker):
    """P's clock is 500 s ahead of D's."""
    remote = Remote("p-1", 1500.0 + HOLD_S)
    worker.now_s += HOLD_S - MARGIN_S - 1
    assert read(worker, remote)
    worker.now_s += 1
    assert not read(worker, remote)
    assert read(worker, Remote("p-2", None))  # a P that says nothing: vLLM's own


def test_the_worker_counts_the_heartbeats_that_go_out(worker):
    """Those to a P without a handshake do not."""
    for _ in range(10):
        waiting = {"p": SimpleNamespace(req_ids={"p-1"}), "p that is not known": SimpleNamespace(req_ids={"p-2"})}
        worker._send_heartbeats(SimpleNamespace(heartbeat_by_engine=waiting))
        worker._send_heartbeats(SimpleNamespace(heartbeat_by_engine={}))
        worker.now_s += 5
    assert read(worker, Remote("p-1", 1500.0 + HOLD_S))
    assert not read(worker, Remote("p-2", 1500.0 + HOLD_S))


def test_a_heartbeat_that_nixl_refuses_does_not_count(worker):
    """Stock code passes over it in silence; what went out before holds for as long as it did."""
    waiting = SimpleNamespace(heartbeat_by_engine={"p": SimpleNamespace(req_ids={"p-1"})})
    worker.now_s += 20
    worker._send_heartbeats(waiting)
    worker.is_cut = True
    for _ in range(3):
        worker.now_s += 4.9
        worker._send_heartbeats(waiting)
    assert worker.sent == [("p's agent", b"HB:p-1")]
    assert read(worker, Remote("p-1", 1500.0 + HOLD_S))
    worker.now_s += 0.3
    assert not read(worker, Remote("p-1", 1500.0 + HOLD_S))


def test_the_other_clock_is_never_taken_for_later_than_it_is(worker, monkeypatch):
    """A D that stands still in the middle of its first contact would rely on P for half of that time too long."""

    def handshake(worker, *_):
        start_s = worker.now_s
        at_p_s = start_s + 0.001 + 500.0  # P answers at once
        worker.now_s += 40.0  # and D sleeps before it looks at its clock again
        return {(0, 0): "p's agent"}, at_p_s - (start_s + worker.now_s) / 2

    monkeypatch.setattr(compat.NixlPullConnectorWorker, "_nixl_handshake", handshake)
    _, offset_s = worker._nixl_handshake("127.0.0.1", 1, 1, "p", 1, 1, False)
    assert offset_s >= 500.0
    assert worker._engine_clock_offset["p"] == offset_s


def test_a_p_that_stood_still_keeps_its_blocks_a_little_longer(worker):
    """D's heartbeats of that time may not have been read yet; a P that runs lets go when it is time."""
    worker._reqs_to_send = {"soon": 1003.0, "later": 1100.0}
    worker.now_s += 1
    worker._reap_expired_send_leases(set())
    assert worker._reqs_to_send == {"soon": 1003.0, "later": 1100.0}
    worker.now_s += MARGIN_S + 1
    worker._reap_expired_send_leases(set())
    assert worker._reqs_to_send == {"soon": worker.now_s + MARGIN_S, "later": 1100.0}


def test_a_grace_is_given_once(worker):
    """Where every step of P's takes long, what no heartbeat has moved must not be kept for ever."""

    def a_long_step():
        worker.now_s += MARGIN_S + 1
        worker._reap_expired_send_leases(set())
        return worker.now_s + MARGIN_S

    worker._reqs_to_send = {"of a dead D": 1003.0, "waited for": 1003.0}
    grace_end_s = a_long_step()
    worker._reqs_to_send["waited for"] += 0.5  # a heartbeat
    last_end_s = a_long_step()
    assert worker._reqs_to_send == {"of a dead D": grace_end_s, "waited for": last_end_s}
    a_long_step()
    assert worker._reqs_to_send == {"of a dead D": grace_end_s, "waited for": last_end_s}
    worker._reqs_to_send = {}
    a_long_step()
    assert not worker._graced
