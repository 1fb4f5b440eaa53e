"""D's scheduler tells the home who generates and how long steps take, and so which way a turn should go."""

from array import array

import pytest

from server_ext.engine import compat

from .harness import STOP_ID, engine_config, ids


@pytest.fixture
def clock(monkeypatch):
    """A clock of the connector that stands still until a test moves it."""
    now_s = [1000.0]
    monkeypatch.setattr("server_ext.engine.decode.time.perf_counter", lambda: now_s[0])
    return now_s


def choose(d, session_id):
    """Begin a first turn that chooses its way, give it up, and return what it chose from."""
    key = {"session_id": session_id, "turn": 1}
    d.control("load", **key)
    packed = array("i", ids(40)).tobytes()
    begun = d.control("begin", **key, prompt_ids=packed, route="auto", prefill_urls=["http://p"])
    d.control("abandon", nonce=begun["nonce"], return_ticket=True)
    return begun["choice"]["by"]


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("ending", ["stop", "abort"])
def test_nothing_is_appended_while_a_request_generates(make_harness, is_async, ending):
    """With a guard of 0, from a request's first step to its end, whatever ends it and whoever sent it."""
    d = make_harness("decode", num_blocks=20, is_async=is_async, itl_guard=0)
    assert choose(d, "before") == "cheapest"
    request = d.add("someone else's", ids(10, 9000))
    d.answer(d.step())
    assert choose(d, "meanwhile") == "guard"
    if ending == "stop":
        d.answer(d.step(), STOP_ID)
    else:
        d.abort(request)
    assert request.is_finished()
    assert choose(d, "after") == "cheapest"


def test_steps_are_timed(make_harness, clock):
    """A step lasts until the next one is scheduled; what a prompt adds to it is what its streams wait."""
    d = make_harness("decode", num_blocks=20)
    d.add("stream", ids(10, 9000), max_tokens=50)
    d.answer(d.step())
    for _ in range(6):
        clock[0] += 0.03
        d.answer(d.step())
    d.add("prompt", ids(100))
    clock[0] += 0.03
    d.answer(d.step())
    clock[0] += 0.53
    d.answer(d.step())
    rates = d.scheduler.connector.connector_scheduler.rates
    assert rates.decode_step_s == pytest.approx(0.03)
    assert rates.stall_s(100) == pytest.approx(0.5)


def test_the_models_shape_gives_the_weight_of_attention(model, tmp_path, monkeypatch):
    """A layer's weights over its attention's width: 64 wide, 4 query and 2 key heads of 32, 128 wide in between."""
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    config = engine_config(model, tmp_path / "secret", "decode")
    queries_and_output, keys_and_values, feed_forward = 2 * 64 * 128, 2 * 64 * 64, 3 * 64 * 128
    weights = queries_and_output + keys_and_values + feed_forward
    assert compat.attention_tokens(config) == pytest.approx(weights / 128)
