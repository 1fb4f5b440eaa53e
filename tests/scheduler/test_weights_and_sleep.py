"""vLLM's own engine core around our connector: new weights and sleep find nothing held by a lease."""

import pytest
from vllm.v1.engine.core import EngineCore

from server_ext.engine import compat, control

from .harness import ids


class _Executor:
    """An executor without a device: what sleep asks of one."""

    def __init__(self):
        self.is_sleeping = False

    def sleep(self, level):
        """Note that the device sleeps."""
        self.is_sleeping = level > 0

    def collective_rpc(self, method):
        """Take vLLM's wait for its device."""
        assert method == "synchronize_device"

    def reset_mm_cache(self):
        """Have no such cache."""

    reset_encoder_cache = reset_mm_cache


@pytest.fixture
def make_core(monkeypatch):
    """Return a function that puts vLLM's engine core, with our plugin in it, around a scheduler."""

    class Core(EngineCore):
        """What vLLM's constructor would build is given."""

        mm_receiver_cache = None

        def __init__(self, scheduler):
            self.scheduler = scheduler
            self.model_executor = _Executor()

    # The plugin's patches go to this class, and end with it.
    monkeypatch.setattr(compat, "EngineCore", Core)
    compat.install_control(control.dispatch)
    return Core


def lease_of(core, session_id="s"):
    """Return a session's lease, asked of the engine core."""
    return core.bidikv_control("get", {"tenant": "", "session_id": session_id})["info"]["lease"]


def test_the_engine_tells_d_of_new_weights(make_harness, make_core):
    """The version that vLLM's own setter is told reaches D's leases; the one that it has already changes nothing."""
    d = make_harness("decode", num_blocks=20)
    core = make_core(d.scheduler)
    d.lease(ids(40), "s")
    core.set_weight_version("default")
    assert lease_of(core)["state"] == "active"
    core.set_weight_version("after training")
    assert core.get_weight_version() == "after training"
    assert (lease_of(core)["state"], lease_of(core)["reason"]) == ("revoked", "model_changed")
    assert d.num_free == 20


def test_the_engine_tells_p_of_new_weights(make_harness, make_core):
    """P reads only what its own weights would have computed."""
    p = make_harness("prefill", num_blocks=20)
    identity = p.scheduler.connector.connector_scheduler.identity
    before = identity.fingerprint
    make_core(p.scheduler).set_weight_version("after training")
    assert identity.fingerprint != before


def test_a_stock_engine_takes_new_weights(make_harness, make_core):
    """The plugin is loaded in every vLLM process, also where another connector runs, or none."""
    d = make_harness("decode", num_blocks=20)
    d.scheduler.connector = None
    core = make_core(d.scheduler)
    core.set_weight_version("after training")
    assert core.get_weight_version() == "after training"


def test_sleep_releases_all_leases_first(make_harness, make_core):
    """Sleep resets the cache as on stock vLLM: leases give way, and a running turn is aborted and leases nothing."""
    d = make_harness("decode", num_blocks=20)
    core = make_core(d.scheduler)
    d.lease(ids(40), "s")
    begun = d.begin(ids(70, 5000), session_id="running")
    d.add("r", ids(70, 5000), session_id=begun["nonce"])
    d.answer(d.step())
    core.sleep(level=1)
    assert core.model_executor.is_sleeping
    assert d.num_free == 20
    assert (lease_of(core)["state"], lease_of(core)["reason"]) == ("revoked", "reset")
    lease = d.settle(begun, ids(70, 5000))["lease"]
    assert (lease["state"], lease["reason"]) == ("revoked", "reset")


def test_sleep_while_a_reader_reads(make_harness, make_core):
    """As stock vLLM during a transfer, the engine says that it cannot; leases stay, and afterwards it can."""
    d = make_harness("decode", num_blocks=20, min_fetch_tokens=0)
    core = make_core(d.scheduler)
    d.lease(ids(40), "s")
    ticket = d.begin(ids(60), turn=2, want_ticket=True)["ticket"]
    with pytest.raises(RuntimeError, match="Failed to reset KV cache"):
        core.sleep(level=1)
    assert not core.model_executor.is_sleeping
    assert lease_of(core)["state"] == "active"
    d.control("return_ticket", ticket_id=ticket["remote_request_id"])
    core.sleep(level=1)
    assert core.model_executor.is_sleeping
    assert d.num_free == 20
