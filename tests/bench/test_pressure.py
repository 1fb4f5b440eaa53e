import asyncio
import itertools
import json
from pathlib import Path

import pytest

from bench._others import Other
from bench._pressure import BIDIKV, NO_LEASES, STOCK, Report, gaps_ms, percentile, summary
from bench._pressure_arms import Answer, Refused, Samples
from bench._pressure_cell import Agents, Asked, Cell, Peaks
from bench._pressure_load import (
    ANSWER_TOKENS,
    BLOCK_SIZE,
    OTHER_TOKENS,
    PERCENTS,
    POOL_BLOCKS,
    Pace,
    arrivals,
    first_prompt,
    num_slots,
    other_prompt,
    sessions_of,
)
from bench._pressure_reference import References, answers
from bench._pressure_table import page
from bench._reference import Generated, Verdict


def tokenize(text):
    """A token a word."""
    return [hash(word) for word in text.split()]


# ---------------------------------------------------------------- the load


@pytest.mark.parametrize("percent", PERCENTS)
def test_the_sessions_hold_what_the_load_says_after_their_first_turns(percent):
    """No session fewer does, and no session more is there."""
    slots = num_slots(percent, tokenize)
    blocks = -(-(len(first_prompt(next(sessions_of(0)), tokenize)) + ANSWER_TOKENS - 1) // BLOCK_SIZE)
    assert slots * blocks >= percent * POOL_BLOCKS / 100 > (slots - 1) * blocks


def test_turns_come_at_one_rate_and_reach_every_session_in_turn():
    """However many sessions there are, as many turns come, and none comes twice before all have come once."""
    pace = Pace(turns_per_s=4.0, duration_s=30.0, grace_s=0.0)
    for slots in (10, 40):
        events = arrivals(slots, pace)
        assert len(events) == pytest.approx(120, rel=0.15)
        assert sorted(slot for _, slot in events[:slots]) == list(range(slots))
        assert all(before < after for (before, _), (after, _) in itertools.pairwise(events))
        assert events[-1][0] < 30.0
        assert events == arrivals(slots, pace)


def test_a_slow_machine_gets_as_many_turns_at_a_slower_pace():
    """As many run at a time, and what began last has time to end."""
    fast, slow = Pace.of(turn_s=0.2, other_s=1.0), Pace.of(turn_s=1.0, other_s=8.0)
    assert fast.turns_per_s == pytest.approx(5 * slow.turns_per_s)
    assert fast.turns_per_s * fast.duration_s == pytest.approx(slow.turns_per_s * slow.duration_s)
    assert slow.grace_s > 2 * 8.0
    assert (fast.ttl_s, slow.ttl_s) == (15, 75)


def test_no_two_sessions_share_a_block():
    """Their prompts differ before the first block is full, and a session's text is the same in every arm."""
    sessions = [session for slot in range(5) for session in itertools.islice(sessions_of(slot), 3)]
    beginnings = {tuple(session.system.split()[:6]) for session in sessions}
    assert len(beginnings) == len(sessions)
    again = next(sessions_of(3))
    assert (again.system, again.delta(2)) == (next(sessions_of(3)).system, next(sessions_of(3)).delta(2))
    assert again.delta(1) != again.delta(2)
    assert {next(sessions_of(slot)).num_turns for slot in range(6)} == {2, 3, 4}


def test_other_requests_share_the_prompts_of_apps():
    """A part of each is shared, another is its own."""
    prompts = [other_prompt(stream, number) for stream in range(8) for number in range(8)]
    assert len({tuple(prompt) for prompt in prompts}) == 64
    assert 1 < len({tuple(prompt[:256]) for prompt in prompts}) <= 8


# ---------------------------------------------------------------- one measurement


class FakeArm:
    """Answers at once, but for the turns that it was told of."""

    name = "fake"

    def __init__(self, hangs=(), fails=()):
        self.hangs, self.fails = hangs, fails
        self.ended = []
        self.asked = []

    async def turn(self, conversation, number, delta, prompt_ids):
        """See `Arm`."""
        self.asked.append((conversation, number, len(delta["messages"])))
        if (conversation, number) in self.hangs:
            await asyncio.sleep(3600)
        if (conversation, number) in self.fails:
            message = "no"
            raise Refused(message)
        return Answer(prompt_ids, [1] * 16, "fetched", ticket_blocks=3)

    async def end(self, conversation):
        """See `Arm`."""
        self.ended.append(conversation)


def run_agents(arm, events, slots=2):
    """Run turns as fast as they come."""

    async def run():
        agents = Agents(arm, slots, "t", tokenize)
        now_s = asyncio.get_running_loop().time()
        await agents.run([(0.0, slot) for slot in events], now_s, now_s + 0.5)
        return agents

    return asyncio.run(run())


def test_sessions_go_on_and_make_room_for_the_next():
    """A turn continues what was said; after the last one the session ends and another begins."""
    arm = FakeArm()
    agents = run_agents(arm, [2] * 3 + [0] * 2, slots=3)  # the session in slot 2 has two turns
    assert arm.asked[:3] == [("t-2-0", 1, 2), ("t-2-0", 2, 1), ("t-2-1", 1, 2)]
    first, second = agents.asked[:2]
    assert second.prompt_ids[: len(first.prompt_ids) + 16] == first.prompt_ids + [1] * 16
    assert arm.ended == ["t-2-0", "t-0-0", "t-2-1"]
    blocks = -(-(len(second.prompt_ids) + ANSWER_TOKENS - 1) // BLOCK_SIZE)
    assert agents.peaks.demanded >= blocks
    assert agents.peaks.ticketed == 3


def test_a_turn_that_hangs_is_left_and_counted():
    """Nobody waits for it for ever; the turns behind it in its session never began."""
    agents = run_agents(FakeArm(hangs={("t-0-0", 1)}), [0, 0, 1])
    assert [one.ended_s is None for one in agents.asked] == [True, False]


def test_a_turn_that_fails_is_an_error_and_ends_its_session():
    """The next turn of the slot belongs to another session."""
    arm = FakeArm(fails={("t-0-0", 1)})
    agents = run_agents(arm, [0, 0])
    assert [one.error for one in agents.asked] == ["no", None]
    assert [conversation for conversation, _, _ in arm.asked] == ["t-0-0", "t-0-1"]


def test_a_stream_is_read_token_by_token():
    """Chunks without tokens are no tokens; the last one tells how much of the prompt was cached."""
    other = Other([1, 2, 3], sent_s=0.0)
    other.take('{"choices": [{"token_ids": [5, 6]}]}', 1.0)
    other.take('{"choices": [{"text": ""}]}', 2.0)
    assert other.cached_tokens is None
    other.take('{"choices": [], "usage": {"prompt_tokens_details": {"cached_tokens": 2}}}', 3.0)
    assert (other.chunk_s, other.token_ids, other.cached_tokens, other.error) == ([1.0], [5, 6], 2, None)
    other.take('{"error": {"message": "no"}}', 4.0)
    assert other.error == "no"


# ---------------------------------------------------------------- what was found


def make_other(gap_s=0.1, cached=4, error=None, num_tokens=OTHER_TOKENS):
    """A request whose tokens come at one distance, from second 1 on."""
    times = [1.0 + gap_s * i for i in range(num_tokens)]
    return Other(list(range(8)), 0.5, times, [9] * num_tokens, cached, error)


def make_samples(preemptions=0, revoked=0, stale=0, without=""):
    """A scrape of our D, or of one that lacks a metric."""
    lines = (
        f"vllm:num_preemptions_total {preemptions}",
        "bidikv_lease_grants_total 0",
        f'bidikv_lease_revocations_total{{reason="lease_revoked"}} {revoked}',
        'bidikv_lease_revocations_total{reason="reset"} 0',
        'bidikv_lease_clips_total{reason="over_budget"} 0',
        'bidikv_lease_rejections_total{reason="over_budget"} 0',
        f"bidikv_revoked_blocks_total {2 * revoked}",
        "bidikv_lease_expiries_total 0",
        'bidikv_tickets_total{event="opened"} 0',
        'bidikv_ticket_refusals_total{reason="over_budget"} 0',
        f"bidikv_stale_reads_total {stale}",
    )
    return Samples("".join(f"{line}\n" for line in lines if not (without and line.startswith(without))))


def make_cell(arm, *, others=None, asked=None, demanded=POOL_BLOCKS * 2, blocks_left=0, **after):
    """A good measurement of ten seconds, unless told otherwise."""
    answer = Answer([1, 2], [3] * ANSWER_TOKENS, "fetched", "cheapest")
    return Cell(
        arm=arm,
        percent=200,
        start_s=0.0,
        end_s=10.0,
        others=[make_other()] if others is None else others,
        asked=[Asked(0, 1, [1, 2], 1.0, 1.5, answer)] if asked is None else asked,
        peaks=Peaks(demanded=demanded, held=5, ticketed=2, used=0.5),
        before=make_samples(preemptions=1),
        after=make_samples(**{"preemptions": 1, "revoked": 3, **after}),
        blocks_left=blocks_left,
    )


def no_wrong(prompt_ids, token_ids):
    """All answers are right."""
    return Verdict(0, 0)


def make_report(ours=(), without=(), **ours_changes):
    """Both arms of the bars under one load."""
    arms = {
        NO_LEASES: summary(without or [make_cell(NO_LEASES, revoked=0)], no_wrong),
        BIDIKV: {**summary(ours or [make_cell(BIDIKV)], no_wrong), **ours_changes},
    }
    setup = {
        "pool_blocks": 255,
        "sessions_at_a_time": {"200": 29},
        "turns_per_s": 4.0,
        "others_at_a_time": 8,
        "others_answer_tokens": 128,
        "duration_s": 20.0,
        "grace_s": 8.0,
        "rounds": 2,
        "lease_ttl_s": 15,
    }
    return Report({200: arms}, setup, "a machine", {"vllm": "0.32.0"})


def missed(report):
    """The names of the missed bars, without the load's."""
    return [bar.name.removeprefix("200 %: ") for bar in report.bars() if not bar.passed]


def test_times_between_tokens_are_those_of_the_window():
    """Of the same stream only, and by when the later token came."""
    others = [Other([], 0.0, [1.0, 2.0, 4.0]), Other([], 0.0, [3.0])]
    assert gaps_ms(others, 2.0, 3.9) == [1000.0]
    assert gaps_ms(others, 0.0, 9.0) == [1000.0, 2000.0]


@pytest.mark.parametrize(
    "name",
    [
        "vllm:num_preemptions_total",
        "bidikv_lease_clips_total",
        "bidikv_revoked_blocks_total",
        "bidikv_tickets_total",
        "bidikv_stale_reads_total",
    ],
)
def test_what_our_engines_do_not_count_is_not_zero(name):
    """A metric that is renamed, or not served, ends the run in place of meeting its bar."""
    cell = make_cell(BIDIKV)
    cell.before, cell.after = make_samples(without=name), make_samples(without=name)
    with pytest.raises(LookupError, match=name):
        summary([cell], no_wrong)


def test_stock_engines_count_no_leases():
    """They serve none of our metrics, and need not."""
    cell = make_cell(STOCK)
    cell.before, cell.after = make_samples(preemptions=1, without="bidikv_"), make_samples(3, without="bidikv_")
    found = summary([cell], no_wrong)
    assert (found["preemptions"], found["leases_granted"], found["leases_shed"]) == (2, 0, {})


def test_a_reason_that_comes_up_during_the_run_counts_from_zero():
    """Some series exist only once something has happened."""
    cell = make_cell(BIDIKV)
    cell.before = make_samples(without='bidikv_lease_revocations_total{reason="lease_revoked"}')
    assert summary([cell], no_wrong)["leases_shed"]["revocations"] == {"lease_revoked": 3, "reset": 0}


def test_percentiles_need_values():
    """One value has none."""
    assert percentile([1.0], 95) is None
    assert percentile([float(i) for i in range(101)], 95) == 95.0


def test_rounds_of_an_arm_are_taken_together():
    """Counters are added up, times pooled, and each round is shown as well."""
    found = summary([make_cell(BIDIKV), make_cell(BIDIKV, others=[make_other(gap_s=0.2, cached=0)])], no_wrong)
    assert found["itl_p95_ms_of_rounds"] == [pytest.approx(100), pytest.approx(200)]
    assert found["itl_p50_ms"] == pytest.approx(100)
    assert found["itl_p95_ms"] == pytest.approx(200)
    assert found["others_hit_rate"] == 0.25
    assert found["leases_shed"]["revocations"] == {"lease_revoked": 6, "reset": 0}
    assert (found["preemptions"], found["held_blocks_peak"], found["ticket_blocks_peak"]) == (0, 5, 2)
    assert (found["demanded_percent"], found["turn_p50_s"], found["ttft_p50_s"]) == (200, 0.5, 0.5)
    assert found["outcomes"] == {"fetched: cheapest": 2}


def test_what_was_not_answered_is_not_left_out():
    """Neither requests nor turns, and errors are told apart from both."""
    others = [make_other(), make_other(cached=None), make_other(cached=None, error="no")]
    asked = [Asked(0, 1, [1], 1.0), Asked(1, 1, [1], 1.0, 2.0, error="never")]
    found = summary([make_cell(STOCK, others=others, asked=asked, blocks_left=None)], no_wrong)
    assert (found["others_answered"], found["others_unanswered"], found["turns_unanswered"]) == (1, 1, 1)
    assert (found["errors"], found["error_texts"], found["blocks_left"]) == (2, ["never", "no"], None)


def test_an_arm_in_which_nothing_came_has_no_numbers():
    """A deadlock is reported, not hidden behind a division by zero."""
    found = summary([make_cell(STOCK, others=[Other([1], 0.0)], asked=[])], no_wrong)
    assert (found["itl_p95_ms"], found["others_hit_rate"], found["turn_p50_s"]) == (None, None, None)
    assert found["others_unanswered"] == 1


def test_a_good_run_meets_all_bars():
    """Nothing of a good result is missed, and the file says so."""
    report = make_report()
    assert missed(report) == []
    assert {bar["pass"] for bar in report.to_json()["bars"]} == {True}


@pytest.mark.parametrize(
    ("changes", "bar"),
    [
        ({"preemptions": 1}, "preemptions, no more than without leases"),
        ({"itl_p95_ms_of_rounds": [110.2]}, "others' inter-token p95, of that without leases"),
        ({"itl_p95_ms_of_rounds": [None]}, "others' inter-token p95, of that without leases"),
        ({"revoked_blocks": 0}, "blocks that leases gave up for requests"),
        ({"others_unanswered": 1}, "not answered (deadlock)"),
        ({"turns_unanswered": 1}, "not answered (deadlock)"),
        ({"errors": 1}, "errors"),
        ({"tokens_wrong": 1}, "wrong tokens"),
        ({"stale_reads": 1}, "stale reads"),
        ({"blocks_left": 1}, "blocks left behind"),
        ({"demanded_percent": 199}, "sessions would hold, in % of the pool"),
    ],
)
def test_each_bar_can_be_missed(changes, bar):
    """One number beyond its limit, and that bar alone says so."""
    assert missed(make_report(**changes)) == [bar]


@pytest.mark.parametrize(("base", "ours", "is_met"), [(0, 0, True), (0, 1, False), (2, 2, True), (2, 3, False)])
def test_preemptions_are_shown_beside_those_without_leases(base, ours, is_met):
    """None where there is none without leases; elsewhere both numbers stand in the bar, not their difference."""
    without = [make_cell(NO_LEASES, revoked=0, preemptions=1 + base)]
    (bar,) = [bar for bar in make_report(without=without, preemptions=ours).bars() if "preemptions" in bar.name]
    assert (bar.value, bar.limit, bar.passed) == (ours, base, is_met)


@pytest.mark.parametrize("num_tokens", [0, 1, ANSWER_TOKENS - 1, ANSWER_TOKENS + 1])
def test_an_answer_of_another_length_is_wrong(num_tokens):
    """All its tokens may be right, and some are missing, or it has no end."""
    asked = [Asked(0, 1, [1], 1.0, 1.5, Answer([1], [3] * num_tokens, "fetched", "cheapest"))]
    found = summary([make_cell(BIDIKV, asked=asked)], no_wrong)
    assert found["tokens_wrong"] == abs(ANSWER_TOKENS - num_tokens)


def test_a_request_that_ended_early_is_wrong_and_one_that_was_left_is_not():
    """The one said that it had ended; the other is counted as unanswered, or as an error."""
    cut = make_other(num_tokens=100)
    left, failed = make_other(cached=None, num_tokens=5), make_other(error="no", num_tokens=5)
    assert summary([make_cell(BIDIKV, others=[cut])], no_wrong)["tokens_wrong"] == OTHER_TOKENS - 100
    assert summary([make_cell(BIDIKV, others=[left, failed])], no_wrong)["tokens_wrong"] == 0


def test_one_disturbed_round_decides_nothing():
    """Inter-token times are compared round by round; the middle of those ratios is judged."""
    base = {"without": [make_cell(NO_LEASES, revoked=0)] * 3}
    report = make_report(ours=[make_cell(BIDIKV)] * 3, itl_p95_ms_of_rounds=[300.0, 105.0, 90.0], **base)
    assert missed(report) == []
    report = make_report(ours=[make_cell(BIDIKV)] * 3, itl_p95_ms_of_rounds=[300.0, 111.0, 90.0], **base)
    assert missed(report) == ["others' inter-token p95, of that without leases"]


def test_the_page_shows_every_arm_that_ran_and_what_was_missed():
    """What an arm has no number for is a dash."""
    report = make_report(tokens_wrong=5, itl_p99_ms=None)
    text = page(report)
    assert "| `bidikv` | 100.0 ms | 100.0 ms | - |" in text
    assert f"| `{NO_LEASES}` |" in text
    assert f"| `{STOCK}` | 100" not in text
    assert "| 200 %: wrong tokens | 5 | at most 0 | **missed** |" in text
    assert "shed: revocations 3 (`lease_revoked`)" in text


def test_the_page_tells_how_many_turns_were_fetched_and_what_they_took():
    """From the cells, beside what three steps of D take; nothing of times where there are none."""
    outcomes = {"fetched: cheapest": 1, "fetched: lease_revoked": 2, "recomputed: first_turn": 4}
    text = page(make_report(outcomes=outcomes, turns_answered=7, turn_p50_s=0.6))
    assert "So 3 of 7 were fetched. Their median is +0.10 s (+20%) from that without leases" in text
    assert "three steps of D, by the others' ITL p50, are 0.30 s." in text
    assert "Their median" not in page(make_report(turn_p50_s=None))


def test_the_page_says_what_is_not_as_shipped():
    """And what the budget of leases leaves out of the blocks that are held."""
    text = page(make_report())
    assert "`default_route` is `fetch` here" in text
    assert "half of the pool (127 blocks)" in text


def test_the_page_shows_every_rounds_ratio_and_that_of_all_together():
    """The bar is the median of the rounds; whoever doubts it sees what was left out."""
    rounds = {"itl_p95_ms_of_rounds": [300.0, 105.0, 90.0], "itl_p95_ms": 120.0}
    text = page(make_report(ours=[make_cell(BIDIKV)] * 3, without=[make_cell(NO_LEASES, revoked=0)] * 3, **rounds))
    assert "3.000, 1.050, 0.900 in the rounds, median 1.050; of all rounds together 1.200." in text
    text = page(make_report(itl_p95_ms_of_rounds=[None], itl_p95_ms=None))
    assert "inf in the rounds, median inf; of all rounds together inf." in text


def test_a_grant_that_the_budget_cut_is_no_lease_that_gave_way():
    """Clips over the budget alone do not meet the bar."""
    report = make_report(revoked_blocks=0, leases_shed={"clips": {"over_budget": 100}})
    assert missed(report) == ["blocks that leases gave up for requests"]


def test_the_documentation_is_that_of_its_numbers():
    """`docs/pressure.md` and the bars of `docs/pressure.json` are what this program makes of the file's numbers."""
    docs = Path(__file__).parents[2] / "docs"
    content = json.loads((docs / "pressure.json").read_text("utf-8"))
    report = Report.from_json(content)
    assert report.to_json() == content
    assert page(report) == (docs / "pressure.md").read_text("utf-8")


# ---------------------------------------------------------------- right answers


class FakePair:
    """Computes: the prompt's last token, again and again."""

    def __init__(self):
        self.asked = []

    async def complete(self, role, prompt_ids, num_tokens):
        """See `Pair`."""
        self.asked.append((role, tuple(prompt_ids), num_tokens))
        return {"token_ids": [prompt_ids[-1]] * num_tokens}

    def generate(self, prompt_ids, num_tokens):
        """See `Pair`: token 9 is as likely as the right one."""
        last = prompt_ids[-1] if prompt_ids[-1] != 9 else prompt_ids[-2]
        return [Generated(last, {last: -1.0, 9: -1.0})] * num_tokens


def test_answers_are_compared_with_a_cold_recompute_of_the_same_prompt():
    """Each prompt is computed once, as long as its longest answer; parts of answers are compared as well."""
    pair = FakePair()
    given = [([1, 2], [2, 2]), ([1, 2], [2, 2, 3]), ([4], []), ([5], [9, 5])]
    references = asyncio.run(References.compute(pair, given))
    assert sorted((prompt, length) for _, prompt, length in pair.asked) == [((1, 2), 3), ((5,), 2)]
    verdicts = [references.verdict(*answer) for answer in given]
    assert verdicts == [Verdict(0, 0), Verdict(1, 0), Verdict(0, 0), Verdict(0, 1)]


def test_all_answers_count():
    """Of turns and of others, also what did not end."""
    cell = make_cell(BIDIKV, asked=[Asked(0, 1, [1], 0.0), Asked(0, 1, [1], 0.0, 1.0, Answer([1], [2], "fetched"))])
    assert answers([cell]) == [(list(range(8)), [9] * OTHER_TOKENS), ([1], [2])]
