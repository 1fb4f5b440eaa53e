"""Many owners keep their leases at once, on an engine that is busy: none is lost, and no step waits for them."""

import time

import pytest

from .harness import BLOCK_SIZE, ids

NUM_SESSIONS = 128
NUM_STREAMS = 8
TTL_S = 2.0
STEP_S = 0.1
NUM_STEPS = 100


@pytest.fixture
def clock(monkeypatch):
    """A clock of the connector that stands still until a test moves it."""
    now_s = [1000.0]
    monkeypatch.setattr("server_ext.engine.decode.time.perf_counter", lambda: now_s[0])
    return now_s


def decode(d, clock, between):
    """Let streams generate, and do something between each two steps; return how many steps all of them took."""
    streams = [d.add(f"stream{i}", ids(BLOCK_SIZE, 10_000 + 100 * i), max_tokens=NUM_STEPS) for i in range(NUM_STREAMS)]
    num_steps = 0
    while not all(stream.is_finished() for stream in streams):
        d.answer(d.step())
        num_steps += 1
        clock[0] += STEP_S
        between()
    assert all(stream.num_output_tokens == NUM_STEPS and not stream.num_preemptions for stream in streams)
    return num_steps


def test_128_leases_are_renewed_behind_every_step(make_harness, clock):
    """Over many of their lives each renewal is granted, and the streams beside them take no step more."""
    d = make_harness("decode", num_blocks=NUM_SESSIONS + 5 * NUM_STREAMS, budget_fraction=1.0, default_ttl_s=TTL_S)
    num_steps = decode(d, clock, lambda: None)
    names = [f"s{i}" for i in range(NUM_SESSIONS)]
    for i, name in enumerate(names):
        d.lease(ids(BLOCK_SIZE - 2, 100_000 + 100 * i), name)
    took_s = []

    def renew_all():
        began_s = time.process_time()
        for name in names:
            reply = d.control("extend", session_id=name, ttl_s=TTL_S)
            assert "error" not in reply
            assert reply["info"]["lease"]["remaining_s"] >= TTL_S
        took_s.append(time.process_time() - began_s)

    assert decode(d, clock, renew_all) == num_steps == NUM_STEPS
    leases = [d.control("get", session_id=name)["info"]["lease"] for name in names]
    assert {(lease["state"], lease["num_blocks"]) for lease in leases} == {("active", 1)}
    # They take milliseconds; were one renewal to look at all leases, they would take a step's time.
    assert sorted(took_s)[len(took_s) // 2] < STEP_S
    clock[0] += 600.0
    assert d.control("get", session_id=names[0])["info"]["pool"]["free_blocks"] == NUM_SESSIONS + 5 * NUM_STREAMS
