"""What commands learn from a decode engine about its size."""

from dataclasses import replace

import pytest

from server_ext.cli._shared import DecodeEngine, find_decode_engine

from .deployment import METRICS, facts

SIZE = DecodeEngine(
    model="m", root="m", max_model_len=4096, kv_bytes_per_token=46_080, pool_tokens=16_384, step_tokens=256
)


def without(name):
    """Return D's metrics without those of a name."""
    return "".join(line for line in METRICS.splitlines(keepends=True) if not line.startswith(name))


def test_the_engine_itself_tells_its_size(deployment):
    """1024 blocks of 16 tokens in 720 MiB: what it runs with, whatever its model's config.json says."""
    assert find_decode_engine(f"{deployment.url}/v1", None) == SIZE


def test_a_key_is_sent_and_a_models_folder_told(deployment):
    """Behind API keys, and where the served name is another one."""
    deployment.api_key = "k"
    deployment.card = {"id": "served", "root": "/models/m"}
    found = find_decode_engine(f"{deployment.url}/v1", "k")
    assert found == replace(SIZE, model="served", root="/models/m")


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda d: vars(d).update(api_key="k"), "v1/models does not answer as a decode engine's does"),
        (lambda d: vars(d).update(card=None), "v1/models does not answer"),
        (
            lambda d: vars(d).update(raw=lambda _, path: (404, {}) if "bidikv" in path else None),
            "v1/bidikv/engine does",
        ),
        (lambda d: vars(d).update(engine=facts("prefill")), "is a prefill engine: give the address of its decode"),
        (lambda d: vars(d).update(metrics=None), "/metrics do not tell how large the cache is"),
        (lambda d: vars(d).update(metrics=without("bidikv_bytes")), "/metrics do not tell how large the cache is"),
        (lambda d: vars(d).update(metrics=without("bidikv_blocks")), "/metrics do not tell how large the cache is"),
        (lambda d: d.engine.pop("block_size"), "/metrics do not tell how large the cache is"),
    ],
)
def test_what_does_not_tell_is_an_error(deployment, change, named):
    """Never a guess: half of the bytes are half of the link's speed."""
    change(deployment)
    with pytest.raises(ValueError, match=named):
        find_decode_engine(f"{deployment.url}/v1", None)


def test_nobody_there(deployment):
    """The address is named."""
    with pytest.raises(ValueError, match=r"127.0.0.1:9/v1/models .* is the address right\?"):
        find_decode_engine("http://127.0.0.1:9/v1", None)


def test_rates_asks_before_it_measures(invoke, deployment):
    """A prompt that does not fit is refused by the engine's own context."""
    result = invoke("rates", "--url", deployment.url, "--max-tokens", "4000")
    assert result.exit_code == 1
    assert "--max-tokens 4000 does not fit into the context of 4096: give at most 3840" in result.stderr


def test_bench_takes_the_bytes_of_the_engine(deployment):
    """The shape is that of the model, its KV cache that of the engine."""
    from server_ext.cli.bench import _model

    model = _model("smollm2-135m", find_decode_engine(f"{deployment.url}/v1", None))
    assert (model.name, model.kv_bytes_per_token) == ("m", 46_080)
    model = _model("llama-3.1-8b", replace(SIZE, kv_bytes_per_token=65_536))
    assert model.kv_bytes_per_token == 65_536
