import json

import pytest

from server_ext.analysis.hardware import (
    GPUS,
    LINKS,
    MODELS,
    UnknownHardware,
    find_gpu,
    find_link,
    find_model,
    read_model,
)
from tests.analysis.logs import limits


@pytest.mark.parametrize(
    ("link", "fixed_s", "tokens"),
    [("nvlink", 0.020, 709), ("400g", 0.020, 778), ("400g", 0.005, 197), ("200g", 0.020, 880), ("25g", 0.020, 46_500)],
)
def test_break_even_of_a_small_model_on_one_gpu(link, fixed_s, tokens):
    """Llama-3.1-8B on an H100: the history from which fetching wins, as worked out by hand for each link."""
    assert limits(link=link, fixed_s=fixed_s).break_even_tokens == pytest.approx(tokens, rel=0.01)


@pytest.mark.parametrize(("history", "ratio"), [(2_048, 2.1), (8_192, 5.3), (32_768, 11.8)])
def test_speed_up_of_200_new_tokens(history, ratio):
    """Over 400G, computing all against fetching the history and computing 200 tokens."""
    one = limits()
    all_s = one.compute_s(history + 200)
    assert all_s / (one.fetch_s(history) + one.compute_s(history + 200, history)) == pytest.approx(ratio, rel=0.03)


def test_break_even_is_where_both_cost_the_same():
    """Whatever the hardware, fetching exactly the break-even length takes as long as computing it."""
    for model in MODELS:
        for gpu in GPUS:
            for link in LINKS:
                one = limits(model.name, gpu.name, link.name)
                at = one.break_even_tokens
                assert one.fetch_s(at) == pytest.approx(one.compute_s(at))


def test_an_engine_takes_as_many_gpus_as_its_weights_need():
    """8 B parameters fit on one H100 with room for 427k tokens; 70 B need four."""
    assert limits().num_gpus == 1
    assert limits().pool_tokens == 426_788
    assert limits("llama-3.3-70b").num_gpus == 4


def test_names_are_found_as_people_write_them():
    """An organisation, a suffix and capitals do not matter; a bandwidth is a link."""
    assert find_model("meta-llama/Meta-Llama-3.1-8B-Instruct").kv_bytes_per_token == 131_072
    assert find_gpu("H100").name == "h100"
    assert find_gpu("312TF, 80GB, 2040GB/s").memory_bytes_per_s == 2.04e12
    assert find_link("12.5GB/s").bytes_per_s == 12.5e9


@pytest.mark.parametrize(("find", "what"), [(find_model, "--model"), (find_gpu, "--gpu"), (find_link, "--link")])
def test_unknown_names_are_refused_with_the_choices(find, what):
    """The message names the option, the value and what there is."""
    with pytest.raises(UnknownHardware, match=rf"{what} 'abacus' is unknown: use one of \w+"):
        find("abacus")


@pytest.mark.parametrize("number", ["0", "9" * 400, "0." + "0" * 400 + "1", "1e9", "-1", "nan", "inf"])
def test_numbers_that_no_hardware_has_are_refused(number):
    """Too large for a float, too small to divide by, or none at all."""
    with pytest.raises(UnknownHardware, match="--gpu"):
        find_gpu(f"{number}TF,80GB,3350GB/s")
    with pytest.raises(UnknownHardware, match="--link"):
        find_link(f"{number}GB/s")


def test_a_models_own_config(tmp_path):
    """The shape of Llama-3.1-8B read from its config.json gives the built-in constants."""
    config = tmp_path / "config.json"
    config.write_text(
        '{"num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8,'
        '"intermediate_size": 14336, "vocab_size": 128256, "max_position_embeddings": 131072,'
        '"torch_dtype": "bfloat16"}'
    )
    model, known = find_model(str(config)), find_model("llama-3.1-8b")
    assert model.kv_bytes_per_token == known.kv_bytes_per_token
    assert model.num_active_params == pytest.approx(known.num_active_params, rel=0.001)
    assert model.weight_bytes == pytest.approx(known.weight_bytes, rel=0.001)
    assert find_model(str(tmp_path)) == model


DEEPSEEK_V3 = {
    "hidden_size": 7168,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 2048,
    "first_k_dense_replace": 3,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "q_lora_rank": 1536,
    "vocab_size": 129280,
    "max_position_embeddings": 163_840,
    "torch_dtype": "bfloat16",
}


def config_of(folder, fields):
    """Write a config.json; return its path as text."""
    path = folder / "config.json"
    path.write_text(json.dumps(fields))
    return str(path)


def test_experts_and_latent_attention_are_read_from_a_config(tmp_path):
    """DeepSeek-V3 as published: 671 B parameters, 37 B of them active (1 B embeddings), one latent per token."""
    model, known = find_model(config_of(tmp_path, DEEPSEEK_V3)), find_model("deepseek-v3")
    assert model.num_active_params == pytest.approx(37e9 - 1e9, rel=0.02)
    assert model.weight_bytes / 2 == pytest.approx(671e9, rel=0.01)
    assert model.kv_bytes_per_token == known.kv_bytes_per_token == 61 * (512 + 64) * 2
    assert model.attention_dim == known.attention_dim
    in_fp8 = find_model(config_of(tmp_path, DEEPSEEK_V3 | {"quantization_config": {"quant_method": "fp8"}}))
    assert in_fp8.weight_bytes == pytest.approx(known.weight_bytes, rel=0.01)


@pytest.mark.parametrize("lacking", ["qk_rope_head_dim", "v_head_dim", "num_experts_per_tok"])
def test_what_a_config_with_experts_or_a_latent_must_say(tmp_path, lacking):
    """No number is made up for a field that is missing: it is named."""
    fields = {name: value for name, value in DEEPSEEK_V3.items() if name != lacking}
    with pytest.raises(UnknownHardware, match=lacking):
        find_model(config_of(tmp_path, fields))


def test_experts_of_other_families(tmp_path):
    """Mixtral names its experts otherwise, and all layers have them; a shared one has a width of its own."""
    mixtral = {
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "intermediate_size": 14336,
        "vocab_size": 32000,
        "max_position_embeddings": 32768,
    }
    model = find_model(config_of(tmp_path, mixtral))
    assert model.weight_bytes / 2 == pytest.approx(46.7e9, rel=0.01)
    assert model.num_active_params == pytest.approx(12.9e9 - 0.26e9, rel=0.01)
    with_shared = find_model(config_of(tmp_path, mixtral | {"shared_expert_intermediate_size": 1000}))
    assert with_shared.num_active_params - model.num_active_params == 32 * 3 * 4096 * 1000


@pytest.mark.parametrize("value", [0, -1, 1.5, True, "32", [32], pytest.param(10**400, id="huge")])
@pytest.mark.parametrize("name", ["num_attention_heads", "num_hidden_layers", "vocab_size", "kv_lora_rank"])
def test_a_count_that_is_none_is_named(tmp_path, name, value):
    """Whatever stands where a count must: the field is named, and with it what to give instead."""
    if (name, value) == ("kv_lora_rank", 0):
        return  # no latent attention
    with pytest.raises(UnknownHardware, match=rf"{name} is .*give another one, a known model, or the measured --rates"):
        find_model(config_of(tmp_path, DEEPSEEK_V3 | {name: value}))


def test_more_heads_than_there_is_room_for(tmp_path):
    """A head of no width would make a cache of no bytes."""
    config = {name: value for name, value in DEEPSEEK_V3.items() if name != "kv_lora_rank"}
    with pytest.raises(UnknownHardware, match="num_attention_heads is 8000, more than hidden_size, which is 7168"):
        find_model(config_of(tmp_path, config | {"num_attention_heads": 8000}))


def test_a_config_that_cannot_be_read(tmp_path):
    """What the operating system says is passed on: of a file that is none, and of a name that no file can have."""
    with pytest.raises(UnknownHardware, match=r"--model .*IsADirectoryError"):
        read_model(tmp_path)
    with pytest.raises(UnknownHardware, match=r"--model 'xxx.* cannot be looked for: .*; give a known model"):
        find_model("x" * 5000)


@pytest.mark.parametrize("text", ["{}", "[]", "no", pytest.param("[" * 100_000, id="deep")])
def test_a_config_that_describes_no_model(tmp_path, text):
    """What cannot be read is refused by its path."""
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(UnknownHardware, match=r"config\.json"):
        find_model(str(tmp_path))


def test_every_constant_names_its_source():
    """No number without where it comes from."""
    assert all(one.source for one in (*MODELS, *GPUS, *LINKS))
