import asyncio
import json
from pathlib import Path

import httpx
import pytest

from bench._stock import DEFAULT_HOLD_S, Handles, StockProxy, stock_config
from server_ext.launch.command import EnginePorts, StackConfig, engine_command

CONFIG = StackConfig(
    model="model",
    served_name="model",
    prefill=EnginePorts(http=1, side_channel=2),
    decode=EnginePorts(http=3, side_channel=4),
    secret_file=Path("secret"),
    extra_args={"decode": ("--max-num-seqs", "8")},
    extra_env={"VLLM_SERVER_DEV_MODE": "1"},
)


def transfer_of(config, role):
    """What vLLM takes: of an argument given twice, the last one."""
    argv = engine_command(config, role, {}).argv
    return json.loads(argv[len(argv) - argv[::-1].index("--kv-transfer-config")])


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_stock_engines_have_vllms_own_connector_and_routes(role):
    """Nothing of ours is loaded but the plugin that lets NIXL's thread pause; what the caller added stays."""
    config = stock_config(CONFIG, bidirectional=False)
    assert transfer_of(config, role)["kv_connector"] == "NixlConnector"
    assert transfer_of(config, role)["kv_connector_extra_config"] == {"num_threads": 0}
    env = engine_command(config, role, {"VLLM_PLUGINS": "bidikv_http"}).env
    assert (env["VLLM_PLUGINS"], env["VLLM_SERVER_DEV_MODE"]) == ("bidikv", "1")
    assert "--max-num-seqs" in engine_command(config, "decode", {}).argv


def test_the_hold_time_is_vllms_own_unless_it_is_set():
    """The default is left to vLLM; a time that is given goes to D."""
    plain = stock_config(CONFIG, bidirectional=True)
    expected = {"num_threads": 0, "bidirectional_kv_xfer": True}
    assert transfer_of(plain, "decode")["kv_connector_extra_config"] == expected
    tuned = stock_config(CONFIG, bidirectional=True, hold_s=15)
    assert transfer_of(tuned, "decode")["kv_connector_extra_config"]["decoder_kv_blocks_ttl"] == 15


def handle(number, num_tokens=100):
    """What D's reply brings."""
    return {"remote_request_id": f"request {number}", "remote_num_tokens": num_tokens}


def test_a_handle_is_good_for_one_turn():
    """It is given once; the next turn without a new one has none."""
    handles = Handles(DEFAULT_HOLD_S, block_size=32)
    handles.put("a", handle(1), now_s=0.0)
    assert handles.take("b", now_s=1.0) is None
    assert handles.take("a", now_s=1.0) == handle(1)
    assert handles.take("a", now_s=1.0) is None


def test_a_handle_that_p_would_decline_is_not_used():
    """P declines a read with 5 s or less left, and the request would fail."""
    handles = Handles(15.0, block_size=32)
    handles.put("a", handle(1), now_s=0.0)
    handles.put("b", handle(2), now_s=0.0)
    assert handles.take("a", now_s=8.9) is not None
    assert handles.take("b", now_s=9.0) is None


def test_d_holds_until_p_has_read_or_time_is_over():
    """Neither the end of a conversation nor a handle on its way frees a block."""
    handles = Handles(15.0, block_size=32)
    handles.put("a", handle(1), now_s=0.0)
    handles.put("b", handle(2, num_tokens=32), now_s=5.0)
    handles.forget("b")
    taken = handles.take("a", now_s=5.0)
    assert handles.num_held_blocks(now_s=5.0) == 4 + 1
    handles.read(taken, now_s=6.0)
    assert handles.num_held_blocks(now_s=19.9) == 1
    assert handles.num_held_blocks(now_s=20.0) == 0


def test_what_d_has_held_is_counted():
    """Until it was read; and for the whole time where the conversation ended, though the benchmark reads it then."""
    handles = Handles(480.0, block_size=32)
    handles.put("a", handle(1, num_tokens=64), now_s=0.0)
    handles.read(handles.take("a", now_s=3.0), now_s=4.0)
    assert handles.pinned_block_s == 2 * 4.0
    handles.put("a", handle(2, num_tokens=96), now_s=10.0)
    assert handles.end("a", now_s=10.0) == handle(2, num_tokens=96)
    assert handles.pinned_block_s == 2 * 4.0 + 3 * 480.0
    assert handles.end("a", now_s=11.0) is None
    assert handles.num_held_blocks(now_s=11.0) == 0


def test_a_conversation_that_ended_long_ago_is_not_read():
    """P would decline it, and its request would hang; D lets go by itself, after as long as counts."""
    handles = Handles(15.0, block_size=32)
    handles.put("a", handle(1, num_tokens=32), now_s=0.0)
    assert handles.end("a", now_s=9.0) is None
    assert handles.pinned_block_s == 15.0
    assert handles.num_held_blocks(now_s=14.9) == 1


def test_an_engine_that_holds_nothing_has_no_handles():
    """Plain P/D replies bring none, and whatever they bring is not kept."""
    handles = Handles(0, block_size=32)
    handles.put("a", handle(1), now_s=0.0)
    handles.put("a", None, now_s=0.0)
    assert handles.take("a", now_s=0.0) is None
    assert handles.num_held_blocks(now_s=0.0) == 0


def make_proxy(calls, status=200):
    """A proxy over two engines that note what they are asked, and answer as vLLM does."""

    def engine(name):
        def answer(request):
            body = json.loads(request.content)
            calls.append((name, body))
            choice = {"token_ids": [7] * body["max_tokens"]}
            params = {**handle(len(calls)), "from": name}
            return httpx.Response(status, json={"choices": [choice], "kv_transfer_params": params})

        return httpx.AsyncClient(base_url="http://engine", transport=httpx.MockTransport(answer))

    return StockProxy(engine("P"), engine("D"), "model", Handles(480, block_size=32), now_s=lambda: 0.0)


def test_a_turn_goes_through_p_and_d_and_back_to_p():
    """P's parameters go to D, and what D's reply brings goes to P with the next turn of the same conversation."""
    calls = []
    proxy = make_proxy(calls)

    async def talk():
        assert await proxy.turn("a", [1, 2], 3) == ([7, 7, 7], False)
        assert await proxy.turn("a", [1, 2, 7, 7, 7, 4], 2) == ([7, 7], True)

    asyncio.run(talk())
    (first, first_on_d), (second, second_on_d) = [(calls[i][1], calls[i + 1][1]) for i in (0, 2)]
    assert [name for name, _ in calls] == ["P", "D", "P", "D"]
    assert first["kv_transfer_params"]["remote_block_ids"] is None
    assert first_on_d["kv_transfer_params"]["from"] == second_on_d["kv_transfer_params"]["from"] == "P"
    assert second["kv_transfer_params"]["from"] == "D"
    assert second["kv_transfer_params"]["do_remote_decode"] is True
    assert [body["max_tokens"] for _, body in calls] == [1, 3, 1, 2]
    assert proxy.handles.num_held_blocks(now_s=0.0) == 4  # of the second turn; P has read the first


def test_a_refusal_is_an_error():
    """The proxy does not hide what an engine says."""
    with pytest.raises(httpx.HTTPStatusError):
        asyncio.run(make_proxy([], status=500).turn("a", [1], 1))
