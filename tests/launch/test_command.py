import json
from dataclasses import replace
from pathlib import Path

import pytest

from server_ext.engine.settings import EngineSettings
from server_ext.launch.command import (
    ROLES,
    EnginePorts,
    StackConfig,
    disabled_plugins,
    engine_command,
    kv_transfer_config,
    merge_plugins,
)

CPU = StackConfig(
    model="/models/small",
    served_name="small",
    prefill=EnginePorts(http=8100, side_channel=5600),
    decode=EnginePorts(http=8200, side_channel=5700),
    secret_file=Path("/state/secret"),
    tool_call_parser="hermes",
)
GPU = replace(CPU, platform="gpu", kv_cache_bytes=None)


def option(config, role, name):
    """The value after `name` in the engine's arguments; None where it is absent."""
    argv = engine_command(config, role, {}).argv
    return argv[argv.index(name) + 1] if name in argv else None


def test_a_cpu_stack_runs_in_float32_with_blocks_that_its_attention_likes():
    """On CPUs both engines use float32, blocks of 32 and no compilation."""
    for role in ("prefill", "decode"):
        assert option(CPU, role, "--dtype") == "float32"
        assert option(CPU, role, "--block-size") == "32"
        assert option(CPU, role, "--distributed-executor-backend") == "uni"
        assert "--enforce-eager" in engine_command(CPU, role, {}).argv


def test_a_gpu_stack_keeps_the_defaults_of_vllm_and_gives_each_engine_its_device():
    """On GPUs nothing is tuned for CPUs, and P and D see one device each."""
    for role, device in (("prefill", "0"), ("decode", "1")):
        command = engine_command(GPU, role, {})
        tuned = {
            "--dtype",
            "--block-size",
            "--enforce-eager",
            "--max-num-batched-tokens",
            "--kv-cache-memory-bytes",
        }
        assert not tuned & set(command.argv)
        assert command.env["CUDA_VISIBLE_DEVICES"] == device
        assert "OMP_NUM_THREADS" not in command.env


def test_two_engines_can_share_one_gpu():
    """The share of memory is passed on where it is given."""
    shared = replace(GPU, gpus=("0", "0"), gpu_memory_utilization=0.4)
    assert engine_command(shared, "decode", {}).env["CUDA_VISIBLE_DEVICES"] == "0"
    assert option(shared, "decode", "--gpu-memory-utilization") == "0.4"


def test_decode_takes_smaller_steps_than_prefill():
    """D answers control calls between steps, so its steps are shorter."""
    steps = {role: int(option(CPU, role, "--max-num-batched-tokens")) for role in ("prefill", "decode")}
    assert steps["decode"] == 256
    assert steps["decode"] < steps["prefill"]


@pytest.mark.parametrize(("config", "device"), [(CPU, "cpu"), (GPU, "cuda")])
def test_buffers_never_lie_in_host_memory_on_a_gpu(config, device):
    """A GPU stack registers device memory, for leased blocks are not copied to the host."""
    for role in ("prefill", "decode"):
        assert kv_transfer_config(config, role)["kv_buffer_device"] == device


@pytest.mark.parametrize(("config", "num_threads"), [(CPU, 0), (GPU, None)])
def test_nixl_has_no_threads_that_spin_on_a_cpu(config, num_threads):
    """Where cores compute, NIXL reads on its polling thread; on GPUs vLLM's own default stands."""
    for role in ROLES:
        assert kv_transfer_config(config, role)["kv_connector_extra_config"].get("num_threads") == num_threads


def test_prefill_can_read_and_decode_cannot():
    """P is kv_both, bidirectional, and fetches however little it is given; D is a plain consumer."""
    prefill, decode = (kv_transfer_config(CPU, role) for role in ("prefill", "decode"))
    assert prefill["kv_role"] == "kv_both"
    assert prefill["kv_connector_extra_config"]["bidirectional_kv_xfer"] is True
    assert prefill["kv_connector_extra_config"]["kv_recompute_threshold"] == 0
    assert decode["kv_role"] == "kv_consumer"
    assert "bidirectional_kv_xfer" not in decode["kv_connector_extra_config"]
    assert prefill["kv_load_failure_policy"] == decode["kv_load_failure_policy"] == "recompute"


def test_our_settings_lie_under_one_name():
    """Each engine learns its role and the secret's file; D also where P is, and the user's settings."""
    config = replace(
        CPU,
        fresh_prefill_salt=True,
        settings={"default_ttl_s": 90},
        prefill_settings={"read_bytes_per_s": 1000},
    )
    prefill, decode = (kv_transfer_config(config, role)["kv_connector_extra_config"]["bidikv"] for role in ROLES)
    assert prefill == {"role": "prefill", "secret_file": "/state/secret", "read_bytes_per_s": 1000}
    assert decode == {
        "role": "decode",
        "secret_file": "/state/secret",
        "prefill_urls": ["http://127.0.0.1:8100"],
        "fresh_prefill_salt": True,
        "default_ttl_s": 90,
    }


def test_the_connector_travels_as_json():
    """The engine gets the transfer configuration as one JSON argument that names our connector."""
    sent = json.loads(option(CPU, "decode", "--kv-transfer-config"))
    assert sent == kv_transfer_config(CPU, "decode")
    assert sent["kv_connector_module_path"] == "server_ext.engine.connector"


def test_only_decode_parses_tool_calls():
    """Clients talk to D alone, so D alone needs the tool parser."""
    prefill = engine_command(CPU, "prefill", {}).argv
    assert option(CPU, "decode", "--tool-call-parser") == "hermes"
    assert "--tool-call-parser" not in prefill


def test_engines_listen_on_this_machine_only_each_on_its_ports():
    """Both engines bind to 127.0.0.1, with HTTP and side-channel ports of their own."""
    for role, http, side_channel in (("prefill", "8100", "5600"), ("decode", "8200", "5700")):
        command = engine_command(CPU, role, {})
        assert option(CPU, role, "--host") == "127.0.0.1"
        assert option(CPU, role, "--port") == http
        assert command.env["VLLM_NIXL_SIDE_CHANNEL_PORT"] == side_channel
    assert CPU.url("decode") == "http://127.0.0.1:8200"


def test_a_single_key_stays_out_of_the_argument_list():
    """One key travels in the environment; several can only be arguments; P gets none of them."""
    one, two = replace(CPU, api_keys=("k1",)), replace(CPU, api_keys=("k1", "k2"))
    assert engine_command(one, "decode", {}).env["VLLM_API_KEY"] == "k1"
    assert "k1" not in engine_command(one, "decode", {}).argv
    argv = engine_command(two, "decode", {}).argv
    assert argv[argv.index("--api-key") + 1 :][:2] == ("k1", "k2")
    assert "VLLM_API_KEY" not in engine_command(one, "prefill", {"VLLM_API_KEY": "stray"}).env
    assert "k1" not in repr(engine_command(one, "decode", {}))


def test_extra_arguments_come_last_and_extra_environment_wins():
    """What the user adds is put last, where vLLM lets it win."""
    config = replace(CPU, extra_args={"decode": ("--dtype", "auto")}, extra_env={"OMP_NUM_THREADS": "4"})
    command = engine_command(config, "decode", {})
    assert command.argv[-2:] == ("--dtype", "auto")
    assert command.env["OMP_NUM_THREADS"] == "4"
    assert engine_command(config, "prefill", {}).argv[-2] == "--kv-transfer-config"


def test_the_environment_is_built_on_the_given_one():
    """Unknown variables stay, a user's transports win, the old KV size variable cannot overrule ours."""
    base = {"PATH": "/bin", "UCX_TLS": "tcp", "VLLM_CPU_KVCACHE_SPACE": "40", "OMP_NUM_THREADS": "8"}
    env = engine_command(CPU, "prefill", base).env
    assert env["PATH"] == "/bin"
    assert env["UCX_TLS"] == "tcp"
    assert env["OMP_NUM_THREADS"] == "2"
    assert "VLLM_CPU_KVCACHE_SPACE" not in env
    assert "HF_HUB_OFFLINE" not in engine_command(replace(CPU, offline=False), "prefill", {}).env
    assert base["OMP_NUM_THREADS"] == "8"


@pytest.mark.parametrize(
    ("current", "merged"),
    [
        (None, "bidikv,bidikv_http"),
        ("", "bidikv,bidikv_http"),
        ("mine,bidikv", "mine,bidikv,bidikv_http"),
        ("bidikv_http,bidikv", "bidikv_http,bidikv"),
    ],
)
def test_plugins_are_added_never_replaced(current, merged):
    """VLLM_PLUGINS keeps what it names and gains ours once."""
    assert merge_plugins(current) == merged
    base = {} if current is None else {"VLLM_PLUGINS": current}
    assert engine_command(CPU, "decode", base).env["VLLM_PLUGINS"] == merged


def test_plugins_that_our_allowlist_disables_are_named():
    """Only where VLLM_PLUGINS was unset does setting it take plugins away."""
    assert disabled_plugins(None, ["other", "bidikv"]) == ["other"]
    assert disabled_plugins("", ["other", "bidikv"]) == []


@pytest.mark.parametrize("role", ROLES)
def test_the_server_takes_the_settings_that_we_send(role, tmp_path):
    """Launcher and engine agree on the names: the engine's own reader accepts both engines' settings."""
    secret_file = tmp_path / "secret"
    secret_file.write_bytes(bytes(32))
    config = replace(CPU, secret_file=secret_file, fresh_prefill_salt=True, settings={"default_ttl_s": 90})
    sent = kv_transfer_config(config, role)["kv_connector_extra_config"]["bidikv"]
    settings = EngineSettings.from_mapping(json.loads(json.dumps(sent)))
    assert settings.role == role
    assert settings.secret == bytes(32)
    if role == "decode":
        assert settings.prefill_urls == (CPU.url("prefill"),)
        assert settings.home.default_ttl_s == 90
        assert settings.fresh_prefill_salt
