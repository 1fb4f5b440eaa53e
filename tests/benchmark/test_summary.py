"""What a benchmark's file and tables say."""

from __future__ import annotations

import json

import pytest

from server_ext.benchmark.limits import MeasuredRates, PrefillRate
from server_ext.benchmark.page import to_html, write_plots
from server_ext.benchmark.rounds import ArmRound, Reference
from server_ext.benchmark.scenarios import Scenario
from server_ext.benchmark.suite import to_file
from server_ext.benchmark.summary import ScenarioResult
from server_ext.benchmark.table import to_markdown
from tests.benchmark.made import sample

SCENARIO = Scenario(name="made", what="Made up.", plan=lambda _: (), arms=("no_reuse", "fetch"), points=(100, 300))
RATES = MeasuredRates(
    prefill=PrefillRate(0.03, 0.001, 4000.0),
    fetch_fixed_s=0.005,
    fetch_bytes_per_s=1e9,
    decode_step_s=0.01,
    kv_bytes_per_token=46_080,
)


def result(num_turns=40) -> ScenarioResult:
    """A scenario of two arms: one takes a second a turn, the other a tenth of it."""
    reference = Reference()
    found = ScenarioResult(SCENARIO, reference, rates=RATES)
    for name, ttft_s in (("no_reuse", 1.0), ("fetch", 0.1)):
        part = ArmRound(name, 0, seconds=10.0, counters={"bytes_moved": 2e6, "pinned_byte_s": 9e5})
        for turn in range(1, num_turns + 1):
            fetched = 0 if turn == 1 or name == "no_reuse" else 90
            part.samples.append(
                sample(
                    name,
                    turn=turn,
                    ttft_s=5.0 if turn == 1 else ttft_s,
                    fetched_tokens=fetched,
                    computed_tokens=100 - fetched,
                    prefill_s=0.13 if not fetched else 0.04,
                    fetch_s=0.009 if fetched else None,
                    outcome="fetched" if fetched else "recomputed",
                )
            )
        part.beside_gaps_s = [0.02, 0.03]
        for one in part.samples if name == "no_reuse" else []:
            reference.prompts.setdefault((0, 0), []).append(one.prompt_ids)
            reference.answers.setdefault((0, 0), []).append(one.token_ids)
        found.add(part)
    return found


def test_first_turns_are_reported_apart():
    """The first turn of a session has nothing to reuse in any arm: it would hide what the others gain."""
    figures = result().to_json()["arms"]["fetch"]
    assert figures["ttft_s"]["p50"]["value"] == pytest.approx(0.1)
    assert figures["ttft_first_turn_s"]["p50"]["value"] == pytest.approx(5.0)
    assert figures["outcomes"] == {"fetched": 1.0}


def test_the_ratio_is_against_the_reference_arm():
    """Ten times faster than without reuse."""
    arms = result().to_json()["arms"]
    assert arms["fetch"]["speedup"]["value"] == pytest.approx(10.0)
    assert arms["no_reuse"]["speedup"]["value"] == pytest.approx(1.0)


def test_a_quantile_that_few_turns_cannot_show_is_left_out():
    """The 99th percentile of 39 turns would be their slowest one."""
    ttft = result().to_json()["arms"]["fetch"]["ttft_s"]
    assert ttft["count"] == 39
    assert "p95" in ttft
    assert "p99" not in ttft


def test_wrong_tokens_are_counted():
    """A turn that says something else than the reference is counted in its arm."""
    found = result()
    part = ArmRound("fetch", 1, samples=[sample("fetch", turn=1, token_ids=(99,))])
    found.add(part)
    assert found.to_json()["arms"]["fetch"]["tokens_wrong"] == 1
    assert found.to_json()["arms"]["no_reuse"]["tokens_wrong"] == 0


def test_turns_belong_to_the_nearest_point():
    """All prompts have 100 tokens: nothing is reported at 300."""
    points = result().to_json()["arms"]["fetch"]["points"]
    assert points["100"]["turns"] == 39
    assert points["300"]["turns"] == 0
    assert points["300"]["ttft_s"] == {"count": 0}


def test_what_the_engines_counted_is_per_token_saved():
    """Pinned byte-seconds are over the tokens that were not computed."""
    figures = result().to_json()["arms"]["fetch"]
    assert figures["pinned_byte_s_per_avoided_token"] == pytest.approx(9e5 / (39 * 90))
    assert figures["bytes_moved"] == 2e6


def test_the_floor_is_compute_bytes_and_one_step():
    """10 tokens behind 90, 100 tokens moved, two reads, one decode step."""
    expected_s = 0.03 + 0.001 * (10 + (100**2 - 90**2) / 4000) + 100 * 46_080 / 1e9 + 2 * 0.005 + 0.01
    assert RATES.floor_s(sample()) == pytest.approx(expected_s)
    assert result().to_json()["arms"]["fetch"]["floor_ratio_p50"] == pytest.approx(0.1 / expected_s)


def test_the_floor_of_a_turn_that_d_appends_moves_nothing():
    """Its computation, and one step; a stock server's turn has none, since nobody knows what it moved."""
    local = sample(outcome="local", reused_tokens=90, fetched_tokens=0)
    assert RATES.floor_s(local) == pytest.approx(0.03 + 0.001 * (10 + (100**2 - 90**2) / 4000) + 0.01)
    found = result()
    found.add(ArmRound("stock", 0, samples=[sample("stock")]))
    assert found.to_json()["arms"]["stock"]["floor_ratio_p50"] is None


def test_turns_that_only_lengthen_the_history_are_not_later_turns():
    """They count as turns of the arm, and their tokens are compared."""
    found = result()
    part = ArmRound("fetch", 0, samples=[sample("fetch", turn=2, ttft_s=99.0, is_measured=False, token_ids=(9,))])
    found.add(part)
    figures = found.to_json()["arms"]["fetch"]
    assert (figures["turns"], figures["turns_measured"], figures["tokens_wrong"]) == (41, 39, 1)


def test_what_engines_do_not_count_stays_unknown():
    """No pinned bytes are not 0 pinned bytes."""
    found = result()
    found.add(ArmRound("stock", 0, samples=[sample("stock", reused_tokens=5)], counters={"bytes_moved": 5.0}))
    figures = found.to_json()["arms"]["stock"]
    assert figures["pinned_byte_s_per_avoided_token"] is None
    assert figures["bytes_moved"] == 5.0


def test_rates_come_from_the_turns_that_show_them():
    """Prefill from turns that computed all, fetching from reads of several sizes, a step from the gaps."""
    prefill = PrefillRate(0.03, 0.001, 4000.0)
    samples = [
        sample("no_reuse", fetched_tokens=0, computed_tokens=n, prompt_tokens=n, prefill_s=prefill.compute_s(n))
        for n in (500, 1000, 2000)
    ]
    samples += [sample(fetched_tokens=n, fetch_s=0.004 + n * 1000 / 2e9) for n in (500, 1000, 2000)]
    found = MeasuredRates.fit(samples, short_prefills=[], attention_tokens=4000.0, kv_bytes_per_token=1000)
    assert found.prefill.token_s == pytest.approx(0.001)
    assert found.prefill.fixed_s == pytest.approx(0.03)
    assert found.fetch_fixed_s == pytest.approx(0.004)
    assert found.fetch_bytes_per_s == pytest.approx(2e9)
    assert found.decode_step_s == pytest.approx(0.01)


def test_reads_of_one_size_put_all_of_their_cost_into_the_bytes():
    """Where no slope is shown, none is made up, and the floor stays positive."""
    samples = [sample("no_reuse", fetched_tokens=0, computed_tokens=n, prompt_tokens=n, prefill_s=n) for n in (1, 2)]
    samples += [sample(fetched_tokens=1000, fetch_s=0.01)] * 3
    found = MeasuredRates.fit(samples, short_prefills=[], attention_tokens=4000.0, kv_bytes_per_token=1000)
    assert found.fetch_fixed_s == 0.0
    assert found.fetch_bytes_per_s == pytest.approx(1e8)


def test_no_read_has_a_cost_below_nothing():
    """A line that would begin below zero is none: all of the cost goes into the bytes."""
    samples = [sample("no_reuse", fetched_tokens=0, computed_tokens=n, prompt_tokens=n, prefill_s=n) for n in (1, 2)]
    samples += [sample(fetched_tokens=n, fetch_s=s) for n, s in ((1000, 0.001), (2000, 0.01))]
    found = MeasuredRates.fit(samples, short_prefills=[], attention_tokens=4000.0, kv_bytes_per_token=1000)
    assert found.fetch_fixed_s == 0.0
    assert found.fetch_bytes_per_s == pytest.approx(1 / 4.2e-9)


def test_a_run_without_a_read_has_no_rate_of_reads():
    """The error says where to look."""
    with pytest.raises(ValueError, match="no turn fetched"):
        MeasuredRates.fit(
            [sample(fetch_s=None)], short_prefills=[(5, 0.1), (9, 0.2)], attention_tokens=1.0, kv_bytes_per_token=1
        )


def test_the_table_names_the_arm_that_all_are_compared_with():
    """It is the first one, whichever was asked for."""
    content = to_file([result()], machine={}, versions={})
    assert "| against no_reuse |" in to_markdown(content)
    arms = content["scenarios"]["made"]["arms"]
    content["scenarios"]["made"]["arms"] = {"fetch": arms["fetch"]}
    assert "| against fetch |" in to_markdown(content)


def test_the_page_holds_all_plots_and_loads_nothing(tmp_path):
    """One file: every plot is in it, and no address of any other."""
    content = json.loads(json.dumps(to_file([result()], machine={"cores": 2}, versions={"vllm": "0.32"})))
    plots = write_plots(content, tmp_path / "plots")
    assert [file.name for file in plots["made"]] == ["made_ttft.png", "made_itl.png", "made_points.png"]
    page = to_html(content, plots)
    assert page.count("data:image/png;base64,") == 3
    assert "http://" not in page
    assert "https://" not in page
    assert "<td>fetch</td>" in page


def test_the_table_has_a_row_for_each_arm():
    """Markdown with the numbers that users judge by."""
    text = to_markdown(to_file([result()], machine={}, versions={}))
    assert "| `fetch` | 39 | 100.0 ms (100.0 to 100.0) |" in text
    assert "10.00x" in text
