"""Rates: of constants, of files, and fitted to samples."""

import json
from dataclasses import asdict, replace

import pytest

from server_ext.analysis.hardware import find_gpu, find_link, find_model
from server_ext.analysis.limits import Limits
from server_ext.simulation.fit import BesideSample, DecodeSample, Shape, TurnSample, fit_rates
from server_ext.simulation.rates import from_limits, read_rates

from .fleets import RATES

SHAPE = Shape(
    model=RATES.model,
    source=RATES.source,
    kv_bytes_per_token=RATES.kv_bytes_per_token,
    max_context_tokens=RATES.max_context_tokens,
    pool_tokens=RATES.pool_tokens,
    step_tokens=RATES.step_tokens,
    prefill_step_tokens=RATES.prefill_step_tokens,
)


def sample(rates, prompt, fetched=0, handed=None):
    """Return the turn that these rates make, on idle engines."""
    handed = prompt if handed is None else handed
    fetch_s = rates.fetch_fixed_s + rates.fetch_s_per_token * fetched if fetched else None
    return TurnSample(
        prompt_tokens=prompt,
        present_tokens=fetched,
        fetched_tokens=fetched,
        handed_tokens=handed,
        control_s=rates.control_s,
        prefill_s=rates.prefill_s(prompt, fetched) + (fetch_s or 0.0),
        fetch_s=fetch_s,
        handover_s=rates.handover_fixed_s + rates.decode_step_s + rates.handover_s_per_token * handed,
    )


def samples(rates):
    """Return the turns of a measurement."""
    fetches = [sample(rates, held + new, held, new) for held in (200, 600, 2_000) for new in (30, 130)]
    return [sample(rates, prompt) for prompt in (30, 200, 500, 1_000, 2_000)] + fetches


def answers(rates):
    """Return the decode steps of a measurement."""
    return [
        DecodeSample(num_sequences=n, context_tokens=c, step_s=rates.step_s(n, c))
        for n, c in ((1, 100), (2, 200), (4, 400), (1, 2_000))
    ]


def numbers(rates):
    """Return all that is a number."""
    return {name: value for name, value in asdict(rates).items() if not isinstance(value, str)}


def test_the_rates_behind_samples_are_found():
    """From what known rates make of a measurement's turns, a fit returns these rates."""
    rates = replace(RATES, decode_s_per_context_token=1e-5)
    found = fit_rates(SHAPE, samples(rates), answers(rates))
    assert numbers(found) == pytest.approx(numbers(rates), rel=1e-6)


def test_what_takes_longer_beside_the_other_engine_is_found():
    """Twice as long is a slowdown of two, a per cent is what measuring varies by; waits are told in steps."""
    step_s = RATES.step_s(1, 100)
    for ratio, found in ((2.0, 2.0), (1.01, 1.0)):
        beside = sample(RATES, 500)
        beside = replace(
            beside,
            prefill_s=ratio * beside.prefill_s,
            control_s=beside.control_s + 1.5 * step_s,
            handover_s=beside.handover_s + 2 * step_s + RATES.decode_s_per_sequence,
        )
        besides = [BesideSample(turn=beside, context_tokens=100, step_s=ratio * step_s)]
        rates = fit_rates(SHAPE, samples(RATES), answers(RATES), besides)
        assert rates.prefill_slowdown == pytest.approx(found)
        assert rates.decode_slowdown == pytest.approx(found)
        assert rates.shares_machines is (found != 1)
        assert rates.control_steps == pytest.approx(1.5)
        assert rates.handover_steps == pytest.approx(2)


def test_a_cost_is_never_a_gain():
    """Where longer prompts took less per token than attention allows, attention is taken to cost nothing."""
    sublinear = [
        replace(one, prefill_s=0.1 + 0.01 * one.prompt_tokens**0.8, fetch_s=None) for one in samples(RATES)[:5]
    ]
    found = fit_rates(SHAPE, sublinear + samples(RATES)[5:8], answers(RATES))
    assert min(numbers(found).values()) >= 0
    assert found.attention_tokens > 100_000


def test_attention_may_be_all_that_is_seen():
    """Prefills that grow with the square of their length alone are rates like others."""
    square_s, fixed_s = 1e-7, 0.01
    turns = [
        replace(one, prefill_s=fixed_s + square_s * one.prompt_tokens**2 + (one.fetch_s or 0), present_tokens=0)
        for one in samples(RATES)
    ]
    found = fit_rates(SHAPE, turns, answers(RATES))
    assert found.prefill_s(2_000) == pytest.approx(fixed_s + square_s * 2_000**2, rel=1e-2)
    assert found.attention_tokens == 1


def test_prefills_that_do_not_grow_are_an_error():
    """They tell no rate; the error says what to do."""
    turns = [replace(one, prefill_s=0.01 + (one.fetch_s or 0)) for one in samples(RATES)]
    with pytest.raises(ValueError, match=r"whatever their length: measure longer ones \(--max-tokens\)"):
        fit_rates(SHAPE, turns, answers(RATES))


@pytest.mark.parametrize(
    ("turns", "decodes", "named"),
    [
        (slice(0, 2), slice(0, 4), "only 2 turns"),
        (slice(0, 5), slice(0, 4), "only 0 fetches"),
        (slice(0, 11), slice(0, 1), "only 1 answers"),
    ],
)
def test_too_few_samples_are_an_error(turns, decodes, named):
    """The error says of what there are too few, and where to look."""
    with pytest.raises(ValueError, match=f"{named}.*logs"):
        fit_rates(SHAPE, samples(RATES)[turns], answers(RATES)[decodes])


def test_a_file_of_rates_is_read_as_it_was_written(tmp_path):
    """Whatever else stands in it, such as the samples, is left alone."""
    path = tmp_path / "rates.json"
    path.write_text(json.dumps({**RATES.to_json(), "samples": {"turns": []}}))
    assert read_rates(path) == RATES


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda d: d.pop("prefill_s_per_token"), "prefill_s_per_token is missing"),
        (lambda d: d.update(decode_step_s=0), "decode_step_s is 0"),
        (lambda d: d.update(fetch_fixed_s=-1), "fetch_fixed_s is -1"),
        (lambda d: d.update(pool_tokens="many"), "pool_tokens is 'many'"),
        (lambda d: d.update(control_s=float("nan")), "control_s is nan"),
        (lambda d: d.update(model=7), "model is 7"),
        (lambda d: d.update(version=9), "version 1"),
        (lambda d: d.update(format="else"), "not a file of rates"),
    ],
)
def test_a_file_that_makes_no_sense_is_refused_by_name(tmp_path, change, named):
    """The error names the file, the value and the fix."""
    data = RATES.to_json()
    change(data)
    path = tmp_path / "rates.json"
    path.write_text(json.dumps(data))
    with pytest.raises(ValueError, match=named) as error:
        read_rates(path)
    assert str(path) in str(error.value)


@pytest.mark.parametrize("text", [None, "", "{", "[1]"])
def test_a_file_that_is_none_is_refused(tmp_path, text):
    """Missing, empty and other files are errors that say what writes the right one."""
    path = tmp_path / "rates.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ValueError, match="bidikv rates"):
        read_rates(path)


def test_measured_rates_and_their_limit_model_agree():
    """What `analyze` computes from the limits is what the simulator computes from the rates."""
    rates = replace(RATES, prefill_fixed_s=0.0)
    limits = rates.to_limits()
    assert limits.compute_s(5_000, 3_000) == pytest.approx(rates.prefill_s(5_000, 3_000))
    assert limits.fetch_s(3_000) == pytest.approx(0.02 + 0.3)
    assert limits.pool_tokens == rates.pool_tokens
    assert limits.decode_s_per_token == pytest.approx(rates.decode_step_s)
    assert limits.hardware == "engines and a link as measured"


def test_constants_become_rates_and_back():
    """The rates of a known model on known hardware have its limit model's times and pool."""
    limits = Limits(find_model("llama-3.1-8b"), find_gpu("h100"), find_link("25g"))
    again = from_limits(limits).to_limits()
    assert again.break_even_tokens == pytest.approx(limits.break_even_tokens, rel=1e-6)
    assert again.pool_tokens == limits.pool_tokens
