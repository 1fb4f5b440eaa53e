import io
import json
from html import escape
from itertools import count

import numpy as np
import pytest
from rich.console import Console

from server_ext.analysis.html import to_html
from server_ext.analysis.memory import DecodeMemory, make_settings
from server_ext.analysis.problems import Problems
from server_ext.analysis.replay import Replay
from server_ext.analysis.report import NothingToAnalyze, Options, analyze
from server_ext.analysis.turns import ROW
from server_ext.cli._analyze_text import show
from server_ext.core.leases import LeaseTable
from server_ext.core.settings import HomeSettings
from tests.analysis.logs import as_lines, chat, growing, ids, limits, report_of, trace, user

KV = 131_072  # bytes a token of the model that the builders take


# ---------------------------------------------------------------- a: what repeats


def test_what_share_of_each_prompt_repeats():
    """Prompts of 640, 1280 and 2560 tokens that only append: 64 and 128 tokens of answers come on top."""
    reuse = report_of(growing([640, 1280, 2560], [0, 10, 20], output=64)).reuse
    assert (reuse.num_sessions, reuse.num_turns, reuse.num_repeat_turns) == (1, 3, 2)
    assert reuse.total_repeated_share == pytest.approx((640 + 1280) / (1280 + 2560))
    assert reuse.total_held_share == pytest.approx((640 + 64 + 1280 + 64) / (1280 + 2560))
    assert reuse.append_only_share == 1
    assert [(one["first"], one["prompt_tokens_p50"], one["held_tokens_p50"]) for one in reuse.by_turn] == [
        (2, 1280, 704),
        (3, 2560, 1344),
    ]


def test_turns_that_do_not_only_append():
    """Of two later turns, one goes back to half of the history: half of the turns only append."""
    lines = growing([1280, 2560], [0, 10])
    lines.append(ids(2560, t=20, history=lines[1]["prompt_token_ids"][:1280], seed=9))
    reuse = report_of(lines).reuse
    assert reuse.append_only_share == 0.5
    assert reuse.total_held_share == pytest.approx((1280 + 1280) / (2560 + 2560))


# ---------------------------------------------------------------- b: the link


def test_bytes_a_turn_and_the_time_they_take():
    """The second turn fetches 6400 tokens of 128 KiB: 839 MB, 18.6 ms over 45 GB/s behind 20 ms."""
    link = report_of(growing([6400, 7000], [0, 10])).link
    assert link.fetch_bytes["p50"] == 6400 * KV
    assert link.fetch_s["p50"] == pytest.approx(0.020 + 6400 * KV / 45e9)
    assert link.break_even_tokens == pytest.approx(777.3, rel=1e-3)
    assert link.above_break_even_share == 1


def test_turns_below_the_break_even_length():
    """Of two later turns one repeats 640 tokens, less than the 777 from which fetching wins."""
    link = report_of(growing([640, 1280, 2000], [0, 10, 20])).link
    assert link.above_break_even_share == 0.5


def test_every_model_with_every_link():
    """The table has a row for each pair; a slow link has a longer break-even length and a smaller speed-up."""
    link = report_of(growing([6400, 7000], [0, 10])).link
    rows = {(row["model"], row["link"]): row for row in link.table}
    assert len(rows) == len(link.table) == 6 * 5
    fast, slow = rows["llama-3.1-8b", "400g"], rows["llama-3.1-8b", "25g"]
    assert fast["break_even_tokens"] < slow["break_even_tokens"]
    assert fast["speedup_p50"] > 3
    assert slow["speedup_p50"] < 1


# ---------------------------------------------------------------- c: holding


def cells_of(items, **more):
    """The cells of the grid, by budget and life of a lease."""
    grid = report_of(items, **more).holding.grid
    return {(cell.budget_fraction, cell.ttl_s): cell for cell in grid}


def test_leases_that_end_before_the_next_turn():
    """Gaps of 30 s and 100 s: a lease of 15 s is never there, one of 60 s once, one of 120 s always."""
    cells = cells_of(growing([6400, 6464, 6528], [0, 30, 130]), ttls_s=(15.0, 60.0, 120.0))
    assert [cells[1.0, ttl].num_whole for ttl in (15.0, 60.0, 120.0)] == [0, 1, 2]
    assert cells[1.0, 60.0].reasons == {"lease_expired": 1}
    assert cells[1.0, 60.0].held_share == pytest.approx(6400 / (6400 + 6464))
    assert cells[1.0, 15.0].gone_share == 1


def test_memory_times_time():
    """A lease of 6400 tokens that lives 60 s, and one of 6464 that ends with the log."""
    cells = cells_of(growing([6400, 6464], [0, 100]), ttls_s=(60.0,))
    assert cells[1.0, 60.0].leased_token_s == pytest.approx(6400 * 60)
    assert cells[1.0, 60.0].peak_leased_tokens == 6464
    assert cells[1.0, 60.0].mean_leased_tokens == pytest.approx(6400 * 0.6)


def test_time_may_begin_at_zero():
    """Traces count from 0: what the first turn leaves behind counts from there."""
    requests = [{"t": t, "in": 6400, "out": 0, "hash_ids": list(range(100)), "api_time": 0.0} for t in (0.0, 100.0)]
    assert cells_of([trace(requests)])[1.0, 60.0].leased_token_s == pytest.approx(6400 * 60)


def test_a_budget_clips_leases():
    """Of a pool of 426,788 tokens, 1 % is 66 blocks of 64: so many tokens of a longer history stay."""
    cells = cells_of(growing([6400, 6464], [0, 10]), budgets=(0.01, 0.5))
    assert cells[0.01, 60.0].held_tokens == int(426_788 // 64 * 0.01) * 64
    assert cells[0.01, 60.0].reasons == {"over_budget": 1}
    assert cells[0.5, 60.0].held_tokens == 6400


def test_requests_take_blocks_from_leases():
    """A request that needs the pool takes what is missing from another session's lease, and then the other way."""
    lines = growing([64_000, 64_064], [0, 30], session="a")
    lines.insert(1, ids(400_000, t=10, session="b", seed=50, duration_s=5.0))
    cell = cells_of(lines)[1.0, 60.0]
    assert cell.reasons == {"lease_revoked": 1}
    num_blocks = 426_788 // 64
    first_missing = 64_000 // 64 + 400_000 // 64 - num_blocks
    then_missing = 64_064 // 64 - (64_000 // 64 - first_missing)
    assert cell.revoked_tokens == (first_missing + then_missing) * 64
    assert cell.num_partial == 1


def test_a_request_that_never_fits():
    """A prompt longer than the pool runs without blocks, leaves no lease, and is counted."""
    cell = cells_of(growing([500_000, 500_064], [0, 10]))[1.0, 60.0]
    assert cell.num_without_room == 2
    assert cell.reasons == {"first_turn": 1}


def test_nothing_is_made_of_a_claimed_length(monkeypatch):
    """A request of ten million tokens counts as one that does not fit: no fleet and no blocks are made for it."""
    asked, begin = [], DecodeMemory.begin

    def watch(memory, *args, **more):
        asked.append(more["prompt_tokens"])
        return begin(memory, *args, **more)

    monkeypatch.setattr(DecodeMemory, "begin", watch)
    holding = report_of([trace([{"t": 0.0, "in": 10_000_000, "out": 9, "api_time": 1.0}])], num_nodes=None).holding
    assert (holding.num_nodes, holding.best.num_without_room) == (2, 1)
    assert max(asked) == 426_788 + 64


def test_a_session_that_comes_back_after_hours():
    """The server forgets a session an hour after its last turn: then a turn is like a first one."""
    lines = growing([6400, 6464], [0, 3 * 3600], session="a") + growing([640], [2 * 3600], session="b")
    assert cells_of(lines)[1.0, 60.0].reasons == {"first_turn": 1}


def test_turns_that_overlap():
    """A turn that begins before the one before it has ended finds what that one leaves when it is ended early."""
    cell = cells_of(growing([6400, 6464], [0, 5], duration_s=9.0))[1.0, 60.0]
    assert cell.num_whole == 1


def test_a_clock_that_a_step_does_not_move(monkeypatch):
    """So far from 0 that a step is lost in rounding, a replay goes on to the next turn."""
    calls, sweep = count(), LeaseTable.sweep

    def sweep_few(table, *, now_s):
        assert next(calls) < 100  # so that it fails, and does not hang
        return sweep(table, now_s=now_s)

    monkeypatch.setattr(LeaseTable, "sweep", sweep_few)
    rows = np.zeros(2, dtype=ROW)
    rows["turn"], rows["prompt"], rows["shared"] = [1, 2], 6400, [0, 6400]
    rows["start_s"] = rows["end_s"] = [5e16, 5e16 + 1000]  # floats are 8 s apart there, a step is 3.75 s
    seen = Replay(1.0, 15.0, limits=limits(), num_nodes=1).run(rows)
    assert seen.reasons == {"lease_expired": 1}


def test_sessions_spread_over_decode_nodes():
    """On two engines each session has the pool of its own engine."""
    lines = growing([300_000, 300_064], [0, 30], session="a", duration_s=1)
    lines += growing([300_000, 300_064], [10, 40], session="b", duration_s=1)
    assert cells_of(lines, num_nodes=1)[1.0, 60.0].num_whole < 2
    assert cells_of(lines, num_nodes=2)[1.0, 60.0].num_whole == 2


def test_as_many_decode_nodes_as_the_running_requests_half_fill():
    """Two requests of 300,000 tokens at once fill 1.4 pools, so three engines are taken."""
    lines = growing([300_000], [0], session="a", duration_s=20) + growing([300_000], [1], session="b", duration_s=20)
    assert report_of(lines, num_nodes=None).holding.num_nodes == 3


def test_gaps_by_how_the_turn_before_ended():
    """After a tool call a program comes back, else a human: their gaps are told apart."""
    ends = ["tool_use", "end_turn", "tool_use"]
    requests = [
        {"t": t, "in": 640, "out": 0, "hash_ids": list(range(10)), "api_time": 1.0, "stop": stop}
        for t, stop in zip((0.0, 5.0, 106.0), ends, strict=True)
    ]
    holding = report_of([trace(requests)]).holding
    assert holding.gap_after_tool_s["p50"] == 4
    assert holding.gap_after_stop_s["p50"] == 100


def test_only_the_first_turns_are_replayed_where_there_are_many():
    """A limit on replayed turns is said in the answer."""
    holding = report_of(growing([640] * 5, range(5)), max_replayed_turns=3).holding
    assert (holding.num_replayed, holding.is_partial) == (3, True)


def test_without_times_nothing_is_replayed():
    """A log without times says so, and TTFT assumes that leases live."""
    lines = growing([6400, 7000], [0, 10])
    for line in lines:
        del line["timestamp"]
    report = report_of(lines)
    assert report.holding.best is None
    assert report.problems.counts["no_time"] == 2
    assert report.verdict.decision == "adopt"
    assert any("no times" in reason for reason in report.verdict.reasons)


def test_a_few_turns_with_times_do_not_speak_for_the_others():
    """One turn of thirty that has a time is not replayed, and (d) is asked of them all."""
    lines = growing([6400 + 64 * n for n in range(30)], range(0, 300, 10))
    for line in lines[:-1]:
        del line["timestamp"]
    report = report_of(lines)
    assert (report.holding.num_replayed, report.holding.best) == (0, None)
    assert report.ttft.baselines["cold"]["num_turns"] == 29


# ---------------------------------------------------------------- d: time to first token


def test_ttft_now_and_with_reuse():
    """One session of two turns, worked out by the formulas: computed now, fetched with reuse; turn 1 apart."""
    ttft = report_of(growing([6400, 7000], [0, 10])).ttft
    one = limits()
    assert ttft.first_turn_s["p50"] == pytest.approx(one.compute_s(6400))
    cold = ttft.baselines["cold"]
    assert cold["now_s"]["p50"] == pytest.approx(one.compute_s(7000))
    assert cold["reuse_s"]["p50"] == pytest.approx(one.fetch_s(6400) + one.compute_s(7000, 6400))
    assert cold["reuse_s"]["p99"] == cold["reuse_s"]["p50"]


def test_a_warm_prefill_engine_gains_only_the_answer():
    """With P's cache warm only the answer can be fetched: 64 tokens are not worth it, 2000 are."""
    one = limits()
    warm = report_of(growing([6400, 7000], [0, 10], output=64)).ttft.baselines["warm"]
    assert warm["now_s"] == warm["reuse_s"]
    warm = report_of(growing([6400, 9000], [0, 10], output=2000)).ttft.baselines["warm"]
    assert warm["now_s"]["p50"] == pytest.approx(one.compute_s(9000, 6400))
    assert warm["reuse_s"]["p50"] == pytest.approx(one.fetch_s(2000) + one.compute_s(9000, 8400))


def test_cache_hits_of_the_log_are_the_baseline_that_counts():
    """Where the log tells `cached_tokens`, the verdict rests on them."""
    lines = growing([64_000, 64_640], [0, 10])
    lines[1]["usage"]["prompt_tokens_details"] = {"cached_tokens": 64_000}
    report = report_of(lines)
    assert report.ttft.baselines["logged"]["now_s"]["p50"] == pytest.approx(limits().compute_s(64_640, 64_000))
    assert report.verdict.basis == "logged"
    assert report.verdict.decision == "do not bother"


@pytest.mark.parametrize(("told", "basis"), [([2], "cold"), (range(1, 9), "cold"), (range(1, 10), "logged")])
def test_cache_hits_count_where_nearly_all_turns_tell_them(told, basis):
    """Of ten later turns at least nine must tell; what the others found is not known, which is not nothing."""
    lines = growing([6400 + 640 * n for n in range(11)], range(0, 110, 10))
    for n in told:
        lines[n]["usage"]["prompt_tokens_details"] = {"cached_tokens": 6400}
    report = report_of(lines)
    assert report.verdict.basis == basis
    assert report.ttft.baselines["cold"]["num_turns"] == 10
    if basis == "logged":
        logged = report.ttft.baselines["logged"]
        assert logged["num_turns"] == 9
        assert logged["now_s"]["p99"] < limits().compute_s(6400 + 640 * 9, 6400)


def test_no_cache_hits_of_one_turn_are_no_baseline():
    """One turn that found nothing does not tell of the others; the verdict stays with its condition."""
    lines = growing([32_000, 33_000, 34_000, 35_000], [0, 10, 20, 30])
    lines[1]["usage"]["cached_tokens"] = 0
    assert "P's own cache loses the session" in report_of(lines).verdict.headline


def test_first_turns_are_those_of_a_cold_cache():
    """What the log says of later turns does not change the figure of first ones."""
    lines = growing([6400, 7000], [0, 10])
    for line in lines:
        line["usage"]["cached_tokens"] = 3200
    ttft = report_of(lines).ttft
    assert "logged" in ttft.baselines
    assert ttft.first_turn_s["p50"] == pytest.approx(limits().compute_s(6400))


def test_measured_times_are_shown():
    """TTFT of the log stands beside what is computed."""
    lines = growing([6400, 7000], [0, 10])
    lines[1]["ttft_ms"] = 1500
    ttft = report_of(lines).ttft
    assert ttft.measured_s["p50"] == pytest.approx(1.5)
    assert ttft.num_measured == 1


def test_no_number_of_a_log_is_too_large_for_a_report():
    """A TTFT that is no number any more in the columns is none, and the report is still JSON."""
    lines = growing([6400, 7000], [0, 10])
    lines[1]["ttft_ms"] = 1e45
    report = report_of(lines)
    assert report.ttft.measured_s is None
    assert json.dumps(report.to_json(), allow_nan=False)


# ---------------------------------------------------------------- the verdict


def test_adopt():
    """Long histories over a fast link: adopt, with settings that the server takes."""
    verdict = report_of(growing([32_000, 33_000, 34_000, 35_000], [0, 10, 20, 30])).verdict
    assert verdict.decision == "adopt"
    condition = "where P's own cache loses the session between turns"
    assert verdict.headline == f"Adopt, {condition} (later turns: 3, too few to rely on)"
    assert verdict.settings == {"default_route": "auto", "budget_fraction": 1.0, "default_ttl_s": 60.0}


@pytest.mark.parametrize("ttl_s", [15.0, 60.0, 1_200.0, 7_200.0])
def test_recommended_settings_are_the_servers(ttl_s):
    """The server takes them as they stand, whatever grid was asked for, and they are what was replayed."""
    times_s = [0, 10, 10 + ttl_s / 2, 20 + ttl_s / 2]
    lines = growing([32_000, 33_000, 34_000, 35_000], times_s)
    settings = report_of(lines, budgets=(0.75,), ttls_s=(ttl_s,)).verdict.settings
    taken = HomeSettings.from_config(settings)
    assert taken == make_settings(0.75, ttl_s)
    assert taken.default_route == "auto"


def test_recommended_settings_without_times():
    """A log that has none says nothing about lives of leases; the server's own stay."""
    lines = [
        {name: value for name, value in line.items() if name != "timestamp"} for line in growing([32_000] * 3, [0] * 3)
    ]
    settings = report_of(lines).verdict.settings
    assert HomeSettings.from_config(settings) == HomeSettings()


def test_lengths_alone_are_no_reason_to_adopt():
    """Prompts of which only the lengths are told repeat nothing; the verdict says so."""
    lines = [{"session_id": "u", "timestamp": n, "usage": {"prompt_tokens": 5000 + 1000 * n}} for n in range(1, 9)]
    report = report_of(lines)
    assert report.reuse.total_held_share == 0
    assert report.verdict.decision == "do not bother"
    assert any("8 turns do not tell what is in their prompts" in reason for reason in report.verdict.reasons)


def test_a_verdict_says_how_many_turns_it_rests_on():
    """Below twenty later turns it says in its headline that they are too few."""
    few, enough = (report_of(growing([6400] * n, range(0, 10 * n, 10))).verdict for n in (20, 21))
    assert few.headline.endswith(" (later turns: 19, too few to rely on)")
    assert "too few" not in enough.headline
    assert any("rests on 20 turns" in reason for reason in enough.reasons)


def test_do_not_bother_with_short_prompts():
    """Histories below the break-even length: nothing to gain, nothing to set."""
    verdict = report_of(growing([64, 128, 192, 256], [0, 10, 20, 30])).verdict
    assert (verdict.decision, verdict.settings, verdict.sessions) == ("do not bother", None, [])


def test_do_not_bother_over_a_slow_link():
    """Over 25 Gbit/s fetching 32k tokens takes longer than computing them."""
    lines = growing([32_000, 33_000, 34_000, 35_000], [0, 10, 20, 30])
    assert report_of(lines, limits=limits(link="25g")).verdict.decision == "do not bother"


def test_adopt_for_some_sessions():
    """One long session among many short ones: the rule tells it from the others."""
    lines = growing([32_000, 33_000, 34_000, 35_000], [0, 10, 20, 30], session="long")
    for n in range(5):
        lines += growing([640, 704, 720], [0, 10, 20], session=f"short{n}")
    verdict = report_of(lines).verdict
    assert verdict.decision == "adopt for these sessions"
    assert [one["session"] for one in verdict.sessions] == ["long"]
    assert (
        verdict.rule
        == "sessions of at least 4 turns with prompts of 33,500 tokens or more on average (right for 100% of the turns)"
    )
    assert verdict.worth_it_share == pytest.approx(4 / 19)


def test_sessions_that_are_worth_it_are_named():
    """Where it is some sessions, the text and the page name ten of them, and count the others."""
    sizes = [("long<%d>", 12, [200, 210, 220, 230]), ("short%d", 10, [10, 11, 12])]
    lines = []
    for name, number, blocks in sizes:
        requests = [{"t": 10.0 * n, "in": 64 * k, "out": 0, "hash_ids": list(range(k))} for n, k in enumerate(blocks)]
        lines += [trace(requests, id=name % i) for i in range(number)]
    report = report_of(lines)
    assert report.verdict.decision == "adopt for these sessions"
    names, others = report.verdict.which.split(" and ")
    assert sum(name.startswith("long<") for name in names.split(", ")) == 10
    assert others == "2 others"
    text = io.StringIO()
    show(report, Console(file=text, width=200))
    assert report.verdict.which in text.getvalue()
    assert escape(report.verdict.which) in to_html(report)


def test_the_cheapest_of_the_good_cells():
    """A longer lease or a larger budget that keeps no more is not recommended."""
    lines = growing([6400, 6464, 6528], [0, 30, 60])
    report = report_of(lines, budgets=(0.5, 1.0), ttls_s=(15.0, 60.0, 300.0))
    assert (report.holding.best.budget_fraction, report.holding.best.ttl_s) == (0.5, 60.0)


def test_nothing_to_analyze():
    """Input without a request is an error that says what was found."""
    with pytest.raises(NothingToAnalyze, match="2 x unknown_format"):
        report_of(["hello", "world"])


def test_one_request_alone():
    """The smallest log has an answer too."""
    report = report_of([chat([user("hi")])])
    assert report.verdict.decision == "do not bother"
    assert report.reuse.held_share is None
    assert report.to_json()["holding"]["best"]["num_turns"] == 0


def test_names_of_files_that_are_no_text():
    """A name that is not UTF-8 can be written, as a place and as a session's name."""
    blocks = [list(range(100)), list(range(200, 300))]
    requests = [{"t": 9.0 * n, "in": 6400, "out": 0, "hash_ids": hashes} for n, hashes in enumerate(blocks)]
    lines = as_lines([trace(requests, id=""), "broken {"], "\udcff.jsonl")
    report = analyze([lines], Problems(), Options(limits=limits(), budgets=(1.0,), ttls_s=(60.0,)))
    text = io.StringIO()
    show(report, Console(file=text, width=200))
    for written in (text.getvalue(), to_html(report), json.dumps(report.to_json(), ensure_ascii=False)):
        assert rb"\udcff.jsonl" in written.encode().replace(rb"\\", b"\\")
    assert {one["name"] for one in report.to_json()["input"]["problems"]} >= {"unknown_format"}
