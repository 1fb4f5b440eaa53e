"""How the engines of the benchmark's scenarios are started, and what is run on them."""

import json
from pathlib import Path

import pytest

from bench._plan import ARMS, FULL_RUN, SHORT_RUN
from bench._setups import HOLD_S, OURS, Setup, hold_s, set_of
from server_ext.launch.command import ROLES, engine_command

SETUP = Setup(name="made", model="m", prefill_tokens=1_500, decode_tokens=3_200, max_model_len=1_024)


def value_of(config, role, name):
    """What vLLM takes: of an argument given twice, the last one."""
    argv = engine_command(config, role, {}).argv
    return argv[len(argv) - argv[::-1].index(name)]


@pytest.fixture
def make_configs(tmp_path):
    """Makes the pairs of a setup with a kilobyte a token."""

    def make(setup):
        return setup.pair_configs(Path("model"), 1_000, tmp_path)

    return make


def test_every_pair_has_the_same_memory(make_configs):
    """P has room for 47 blocks and D for 100; vLLM takes one more for itself."""
    configs = make_configs(SETUP)
    assert set(configs) == {OURS, *HOLD_S}
    for config in configs.values():
        found = [int(value_of(config, role, "--kv-cache-memory-bytes")) for role in ROLES]
        assert found == [48 * 32_000, 101 * 32_000]
        assert value_of(config, "decode", "--max-model-len") == "1024"
    assert SETUP.aggregated_args(1_000)[1] == str(148 * 32_000)


def test_no_two_pairs_share_a_port(make_configs):
    """They stand still, but they listen."""
    configs = make_configs(SETUP).values()
    assert len({config.url(role) for config in configs for role in ROLES}) == 2 * len(configs)


def test_a_slow_link_is_slow_for_every_pair(make_configs):
    """The stock pairs read over the same link as ours, 100 tokens a second, and keep what else is set."""
    for name, config in make_configs(Setup(name="slow", model="m", link_tokens_per_s=100.0)).items():
        for role in ROLES:
            transfer = json.loads(value_of(config, role, "--kv-transfer-config"))
            assert transfer["kv_connector_module_path"] == "bench.slow_link"
            assert transfer["kv_connector_extra_config"]["slow_link"] == {"bytes_per_s": 1e5, "block_bytes": 32_000}
            connector = "SlowLinkBidiKVConnector" if name == OURS else "SlowLinkNixlConnector"
            assert transfer["kv_connector"] == connector
            assert "bidirectional_kv_xfer" in transfer["kv_connector_extra_config"] or (name, role) == (OURS, "decode")


def test_stock_holds_as_long_as_vllm_says_or_as_long_as_we_do(make_configs):
    """D's default is left to vLLM; tuned is our leases' 60 s. D reports what the arm is timed by."""
    configs = make_configs(SETUP)
    found = {
        name: json.loads(value_of(configs[name], "decode", "--kv-transfer-config"))["kv_connector_extra_config"].get(
            "decoder_kv_blocks_ttl"
        )
        for name in HOLD_S
    }
    assert found == {"stock_bidirectional": None, "stock_bidirectional_tuned": 60}
    assert [hold_s(name) for name in HOLD_S] == [480, 60]
    for name, config in configs.items():
        has_metrics = "--enable-per-request-metrics" in engine_command(config, "decode", {}).argv
        assert has_metrics is (name != OURS)


def test_the_plan_has_what_the_benchmark_promises():
    """All arms, four scenarios with both models, and enough turns with the tiny one for a 99th percentile."""
    assert [one.scenario.name for one in SHORT_RUN] == ["long_agent", "short_chat"]
    assert all(one.rounds >= 5 and one.scenario.arms == ARMS for one in SHORT_RUN)
    full = {one.scenario.name: one for one in FULL_RUN}
    assert full["long_agent"].scenario.points + full["longest_agent"].scenario.points == (2_000, 3_000, 6_000)
    for name in ("long_agent", "short_chat", "prefill_pressure", "slow_link"):
        assert full[name].scenario.arms == full[f"{name}_tiny"].scenario.arms == ARMS
        assert full[name].rounds >= 3
        tiny = full[f"{name}_tiny"]
        later = [len(one.asks) - 1 for number in range(tiny.rounds) for one in tiny.scenario.scripts(number, seed=1)]
        assert sum(later) >= 500
    assert {set_of(arm) for arm in ARMS} == {OURS, *HOLD_S, "aggregated"}


@pytest.mark.parametrize("part", FULL_RUN, ids=lambda part: part.scenario.name)
def test_every_conversation_fits_its_engines(part):
    """The longest prompt with its answer, with some for the template of each turn, is below the model's limit."""
    for script in part.scenario.scripts(0, seed=1):
        words = len(script.system.split()) + sum(len(ask.delta.split()) + ask.output_tokens for ask in script.asks)
        assert words + 20 * len(script.asks) < (part.setup.max_model_len or 8_192)
