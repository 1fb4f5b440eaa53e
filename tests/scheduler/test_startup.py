"""What the connector refuses at start-up, and how clearly."""

import asyncio
import inspect
from argparse import Namespace
from types import SimpleNamespace

import pytest
import torch
from vllm.config import KVTransferConfig
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    HiddenStateCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    RSWASpec,
    SinkFullAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from server_ext.engine import compat, control
from server_ext.engine.settings import EngineSettings
from server_ext.http.plugin import BidiKVPlugin

from .harness import BLOCK_SIZE, SECRET, engine_config


@pytest.fixture
def config(model, tmp_path, monkeypatch):
    """D's configuration, to be broken by a test."""
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    return engine_config(model, tmp_path / "secret", "decode")


class _Groups:
    """A KV cache configuration, as far as the refusals look."""

    def __init__(self, *specs):
        self.kv_cache_groups = [type("Group", (), {"kv_cache_spec": spec}) for spec in specs]


@pytest.mark.parametrize(
    ("break_it", "reads", "named"),
    [
        (lambda c: setattr(c.kv_transfer_config, "kv_role", "kv_producer"), True, "kv_role='kv_producer'"),
        (lambda c: setattr(c.kv_transfer_config, "kv_load_failure_policy", "fail"), False, "kv_load_failure_policy"),
        (lambda c: setattr(c.parallel_config, "tensor_parallel_size", 2), False, "tensor_parallel_size=2"),
        (lambda c: setattr(c.parallel_config, "pipeline_parallel_size", 2), False, "pipeline_parallel_size=2"),
        (lambda c: setattr(c.parallel_config, "data_parallel_size", 2), False, "data_parallel_size=2"),
        (lambda c: setattr(c.parallel_config, "decode_context_parallel_size", 2), False, "context parallelism"),
        (lambda c: setattr(c.parallel_config, "prefill_context_parallel_size", 2), False, "context parallelism"),
        (lambda c: setattr(c.parallel_config, "_api_process_count", 2), False, "--api-server-count=2"),
        (lambda c: setattr(c.cache_config, "enable_prefix_caching", False), False, "prefix caching is off"),
        (lambda c: setattr(c, "speculative_config", object()), False, "speculative"),
        (lambda c: setattr(c, "lora_config", object()), False, "LoRA"),
        (lambda c: setattr(c.kv_transfer_config, "engine_id", "d1"), False, "engine_id='d1'"),
    ],
)
def test_a_configuration_that_cannot_be_served_is_refused_by_name(make_harness, config, break_it, reads, named):
    """The error names the setting, its value and the fix."""
    groups = make_harness("decode", num_blocks=4).scheduler.kv_cache_config
    compat.refuse_unsupported(config, groups, reads=reads and False)
    break_it(config)
    with pytest.raises(ValueError, match=named):
        compat.refuse_unsupported(config, groups, reads=reads)


@pytest.mark.parametrize("reads", [True, False], ids=["P without", "D with"])
def test_bidirectional_transfer_on_the_wrong_engine_is_refused(config, reads):
    """A P without it would wait for reads that never begin; a D with it would hold every turn's blocks for minutes."""
    transfer = config.kv_transfer_config
    transfer.kv_role = "kv_both" if reads else "kv_consumer"
    transfer.kv_connector_extra_config["bidirectional_kv_xfer"] = reads
    compat.refuse_unsupported(config, _Groups(FULL), reads=reads)
    transfer.kv_connector_extra_config["bidirectional_kv_xfer"] = not reads
    with pytest.raises(ValueError, match="bidirectional_kv_xfer"):
        compat.refuse_unsupported(config, _Groups(FULL), reads=reads)


def test_another_connector_beside_ours_is_refused(config):
    """Within a MultiConnector ours would not be reached, and other connectors would store what leases hold."""
    ours = config.kv_transfer_config
    connectors = [
        {
            "kv_connector": ours.kv_connector,
            "kv_connector_module_path": ours.kv_connector_module_path,
            "kv_role": ours.kv_role,
            "kv_connector_extra_config": ours.kv_connector_extra_config,
        },
        {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"},
    ]
    config.kv_transfer_config = KVTransferConfig(
        kv_connector="MultiConnector", kv_role="kv_both", kv_connector_extra_config={"connectors": connectors}
    )
    starting = BidiKVPlugin().init_state(
        SimpleNamespace(vllm_config=config), SimpleNamespace(), Namespace(api_key=None)
    )
    with pytest.raises(ValueError, match=r"kv_connector='MultiConnector'.*kv_connector='BidiKVConnector' alone"):
        asyncio.run(starting)


LAYER = {"block_size": BLOCK_SIZE, "num_kv_heads": 1, "head_size": 1, "dtype": torch.float32}
FULL = FullAttentionSpec(**LAYER)


def test_models_with_several_kinds_of_attention_are_refused(config):
    """Hybrid models would need a lease of each kind of block; one group of full attention is served."""
    compat.refuse_unsupported(config, _Groups(FULL), reads=False)
    with pytest.raises(ValueError, match="KV cache groups"):
        compat.refuse_unsupported(config, _Groups(FULL, FULL), reads=False)


@pytest.mark.parametrize(
    ("spec", "named"),
    [
        (SlidingWindowSpec(**LAYER, sliding_window=64), r"SlidingWindowSpec\(sliding_window=64\)"),
        (ChunkedLocalAttentionSpec(**LAYER, attention_chunk_size=64), "ChunkedLocalAttentionSpec"),
        (MambaSpec(block_size=BLOCK_SIZE, shapes=((1,),), dtypes=(torch.float32,)), "MambaSpec"),
        (RSWASpec(**LAYER, rswa_window=64), "RSWASpec"),
        (SinkFullAttentionSpec(**LAYER, sink_len=32), "SinkFullAttentionSpec"),
        (MLAAttentionSpec(**LAYER), "MLAAttentionSpec"),
        (HiddenStateCacheSpec(**LAYER), "HiddenStateCacheSpec"),
        (UniformTypeKVCacheSpecs(block_size=BLOCK_SIZE, kv_cache_specs={"layer": FULL}), "UniformTypeKVCacheSpecs"),
        (FullAttentionSpec(**LAYER, sliding_window=64), r"FullAttentionSpec\(sliding_window=64\)"),
        (FullAttentionSpec(**LAYER, attention_chunk_size=64), r"FullAttentionSpec\(attention_chunk_size=64\)"),
        (FullAttentionSpec(**LAYER, non_causal=True), r"FullAttentionSpec\(non_causal=True\)"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_every_kind_of_attention_but_plain_full_attention_is_refused_by_name(config, spec, named):
    """Also where vLLM calls it full attention: blocks that are dropped, put in front or shared differently."""
    with pytest.raises(ValueError, match=f"KV cache groups .*{named}"):
        compat.refuse_unsupported(config, _Groups(spec), reads=False)


def test_host_buffers_on_a_gpu_are_refused(config, monkeypatch):
    """Leased blocks never reach vLLM's host staging buffers: a reader would get garbage."""
    monkeypatch.setattr(type(compat.current_platform), "device_type", "cuda")
    with pytest.raises(ValueError, match="kv_buffer_device='cpu'"):
        compat.refuse_unsupported(config, _Groups(), reads=False)


def test_another_vllm_is_refused(monkeypatch):
    """The error says which version there is, which are supported, and how to start without bidikv."""
    monkeypatch.setattr(compat.vllm, "__version__", "0.33.0")
    with pytest.raises(RuntimeError, match=r"0\.32.*0\.33\.0 is installed.*VLLM_PLUGINS"):
        compat.require_supported_version()


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda them: them[:-1], id="one-fewer"),
        pytest.param(lambda them: [*them[:2], them[3], them[2], *them[4:]], id="another-order"),
        pytest.param(lambda them: [*them[:-1], them[-1].replace(default=None)], id="another-default"),
    ],
)
def test_a_changed_cache_manager_is_refused(change):
    """The guard knows the allocation that it wraps, or does not wrap it: it hands on each argument by its place."""
    manager = _cache_manager(change(_stock_parameters()), seen=[])
    stock = manager.allocate_slots
    with pytest.raises(RuntimeError, match="allocate_slots has unknown parameters"):
        compat.guard_allocations(manager, lambda _: False, lambda: True)
    assert manager.allocate_slots is stock


def test_an_allocation_gets_what_it_was_asked_with():
    """Behind the guard, each argument comes under its own name, and what vLLM answers goes back."""
    seen = []
    manager = _cache_manager(_stock_parameters(), seen)
    compat.guard_allocations(manager, lambda _: False, lambda: True)
    asked = {parameter.name: object() for parameter in _stock_parameters()}
    assert manager.allocate_slots(**asked) == "slots"
    assert seen == [tuple(asked.values())]


def _stock_parameters():
    """Return those of vLLM's own allocation."""
    _, *parameters = inspect.signature(KVCacheManager.allocate_slots).parameters.values()
    return parameters


def _cache_manager(parameters, seen):
    """Return one whose allocation has such parameters, and notes what it gets."""

    def allocate_slots(*args):
        seen.append(args)
        return "slots"

    allocate_slots.__signature__ = inspect.Signature(parameters)
    return SimpleNamespace(block_pool=None, allocate_slots=allocate_slots, reset_prefix_cache=lambda: None)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"role": "both"}, "role is 'both'"),
        ({"role": "decode"}, "secret_file is None"),
        ({"role": "decode", "secret_file": "/nonexistent/secret"}, "cannot be read"),
        ({"role": "decode", "secret_file": "SHORT"}, "has 5 bytes"),
        ({"role": "decode", "secret_file": "GOOD", "prefill_urls": ["10.0.0.1"]}, "prefill_urls"),
        ({"role": "decode", "secret_file": "GOOD", "prefill_timeout_s": 0}, "prefill_timeout_s is 0"),
        ({"role": "decode", "secret_file": "GOOD", "fresh_prefill_salt": 1}, "fresh_prefill_salt is 1"),
        ({"role": "decode", "secret_file": "GOOD", "session_id_fields": "id"}, "session_id_fields is 'id'"),
        ({"role": "decode", "secret_file": "GOOD", "session_id_headers": [""]}, "session_id_headers is"),
        ({"role": "decode", "secret_file": "GOOD", "parent_id_fields": [1]}, "parent_id_fields is"),
        ({"role": "decode", "secret_file": "GOOD", "parent_id_headers": {}}, "parent_id_headers is"),
        ({"role": "decode", "secret_file": "GOOD", "session_final_headers": "x"}, "session_final_headers is 'x'"),
        ({"role": "decode", "secret_file": "GOOD", "budget": 1}, "budget"),
    ],
)
def test_a_bad_setting_is_refused_by_name(tmp_path, settings, named):
    """The error names the setting, its value and the fix."""
    files = {"GOOD": SECRET, "SHORT": b"short"}
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    if settings.get("secret_file") in files:
        settings = {**settings, "secret_file": str(tmp_path / settings["secret_file"])}
    with pytest.raises(ValueError, match=named):
        EngineSettings.from_mapping(settings)


def test_names_of_sessions_that_are_given_replace_the_default(tmp_path):
    """Dynamo's headers are understood unless the settings say otherwise."""
    (tmp_path / "secret").write_bytes(SECRET)
    config = {"role": "decode", "secret_file": str(tmp_path / "secret")}
    default = EngineSettings.from_mapping(config)
    assert default.session_id_headers == ("X-Dynamo-Session-ID",)
    own = EngineSettings.from_mapping({**config, "session_id_headers": [], "parent_id_headers": ["X-Parent"]})
    assert (own.session_id_headers, own.parent_id_headers) == ((), ("X-Parent",))
    assert own.session_final_headers == default.session_final_headers == ("X-Dynamo-Session-Final",)


@pytest.mark.parametrize(
    ("url", "is_good"),
    [
        ("http://10.0.0.1:8000", True),
        ("https://p.example/pool/", True),
        ("http://[::1]:8000", True),
        ("http://[", False),
        ("http://", False),
        ("http://:8000", False),
        ("http://p.example:80000", False),
        ("http://p.example:port", False),
        ("http://p example", False),
        ("http://p.example?x=1", False),
        ("http://\u00e9_\u00fc", False),
        ("ftp://p.example", False),
        (7, False),
    ],
)
def test_a_prefill_url_that_cannot_be_called_is_refused(tmp_path, url, is_good):
    """What looks like a URL and is none stops the start, not every turn after it."""
    (tmp_path / "secret").write_bytes(SECRET)
    settings = {"role": "decode", "secret_file": str(tmp_path / "secret"), "prefill_urls": [url]}
    if is_good:
        assert EngineSettings.from_mapping(settings).prefill_urls == (url.rstrip("/"),)
    else:
        with pytest.raises(ValueError, match="prefill_urls"):
            EngineSettings.from_mapping(settings)


def test_an_engine_without_our_connector_says_so():
    """A control call to a stock engine is an error with the fix, not an attribute error."""
    reply = control.dispatch(None, "get", {})
    assert reply["error"]["code"] == "engine_unavailable"
    assert "BidiKVConnector" in reply["error"]["message"]
