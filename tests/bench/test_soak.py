"""What a soak is made of, without engines: its plans, its faults, its judge, and what it makes of its numbers."""

import json
from itertools import islice
from random import Random

import pytest

from bench import _soak_faults
from bench._reference import Generated, Verdict, judge
from bench._soak_agents import Answer
from bench._soak_judges import Judges, is_same_text, wrong_end
from bench._soak_plan import (
    MAX_OUTPUT_TOKENS,
    MAX_TOKENS,
    OTHER_FAULTS,
    TIME_DIVISOR,
    kept,
    kills,
    leaves_time,
    made_up,
    measured_from_s,
    other_faults,
    recorded,
)
from bench._soak_result import Sample, SoakResult, curves, slope_mb_per_min, slopes
from server_ext.traffic import PlannedSession, PlannedTurn, prompts
from tests.engine.common import total

# ---------------------------------------------------------------- plans


def test_the_same_seed_plans_the_same_soak():
    """Sessions, kills and other faults come from the seed alone."""
    assert list(islice(made_up(3), 20)) == list(islice(made_up(3), 20))
    assert list(islice(made_up(3), 20)) != list(islice(made_up(4), 20))
    assert kills(Random(3), 600) == kills(Random(3), 600)
    assert list(islice(other_faults(Random(3), 5), 20)) == list(islice(other_faults(Random(3), 5), 20))


def test_made_up_sessions_fit_the_model():
    """No prompt with its answer is planned longer than the model takes."""
    for session in islice(made_up(1), 200):
        for (num_prompt, _), turn in zip(prompts(session), session.turns, strict=True):
            assert num_prompt + turn.output_tokens <= MAX_TOKENS + len(session.turns)
            assert turn.output_tokens <= MAX_OUTPUT_TOKENS


def test_recorded_sessions_keep_their_shape():
    """Tokens of a session shrink alike, gaps of all sessions by one factor, and the sessions come again."""
    long = PlannedSession(
        0.0,
        (
            PlannedTurn(0.0, after_tool=False, delta_tokens=100_000, output_tokens=500),
            PlannedTurn(40.0, after_tool=True, delta_tokens=20_000, output_tokens=5_000, kept_tokens=50_000),
        ),
    )
    first, again = islice(recorded([long]), 2)
    assert first == again
    one, two = first.turns
    assert one.delta_tokens + one.output_tokens <= MAX_TOKENS
    assert two.gap_s == 40.0 / TIME_DIVISOR
    assert two.kept_tokens / one.delta_tokens == pytest.approx(0.5, abs=0.01)
    assert two.delta_tokens / one.delta_tokens == pytest.approx(0.2, abs=0.01)


def test_traces_without_a_session_are_refused():
    """A soak of nothing would pass."""
    with pytest.raises(ValueError, match="no session"):
        next(recorded([]))


MESSAGES = [
    {"role": "system", "content": "a b"},
    {"role": "user", "content": "c d e f"},
    {"role": "assistant", "content": "g"},
]


@pytest.mark.parametrize(
    ("num_tokens", "contents"),
    [
        (0, []),
        (2, ["a b"]),
        (4, ["a b", "c d"]),
        (6, ["a b", "c d e f"]),
        (99, ["a b", "c d e f", "g"]),
    ],
)
def test_a_history_is_cut_where_the_plan_says(num_tokens, contents):
    """What lies within the first tokens stays, and the message at the edge is cut."""
    assert [message["content"] for message in kept(MESSAGES, num_tokens, [2, 4, 1])] == contents


# ---------------------------------------------------------------- faults


def test_every_fault_that_is_drawn_can_be_done():
    """No name is drawn that nothing stands for, and nothing is never drawn."""
    assert set(OTHER_FAULTS) == set(_soak_faults.FAULTS)


@pytest.mark.parametrize("duration_s", [60, 120, 600, 1800])
def test_engines_die_before_memory_is_watched(duration_s):
    """A start of an engine takes half a minute: the last one is over before its memory counts."""
    for seed in range(50):
        planned = kills(Random(seed), duration_s)
        assert planned
        assert [kill.at_s for kill in planned] == sorted(kill.at_s for kill in planned)
        assert planned[-1].at_s < 0.75 * measured_from_s(duration_s)
    assert {kill.role for kill in kills(Random(1), 600)} == {"prefill", "decode"}


def test_no_engine_is_killed_that_would_come_back_too_late():
    """By what starts took so far; the first kill is never left out."""
    assert leaves_time(28.0, 0.0, 600)
    assert leaves_time(105.0, 77.0, 600)
    assert not leaves_time(265.0, 161.0, 600)


# ---------------------------------------------------------------- the judge


def reference(script):
    """A reference that says what a script of (place, {token: log-probability}) gives, by the length of the prompt."""

    def generate(prompt_ids, num_tokens):
        likely = [script[len(prompt_ids) + i] for i in range(num_tokens)]
        return [Generated(max(logprobs, key=logprobs.get), logprobs) for logprobs in likely]

    return generate


RIGHT = {3: {7: -0.1, 8: -2.0}, 4: {8: -0.1, 9: -0.1005}, 5: {9: -0.1, 7: -3.0}}


@pytest.mark.parametrize(
    ("answer_ids", "verdict"),
    [
        ([7, 8, 9], Verdict(0, 0)),
        ([7, 9, 9], Verdict(0, 1)),
        ([8, 8, 9], Verdict(1, 0)),
        ([7, 8, 6], Verdict(1, 0)),
        ([7, 9, 7], Verdict(1, 1)),
        ([], Verdict(0, 0)),
    ],
)
def test_a_token_is_wrong_unless_rounding_explains_it(answer_ids, verdict):
    """Two tokens that are as likely as each other may change places; anything else is wrong."""
    assert judge([1, 2, 3], answer_ids, reference(RIGHT)) == verdict


@pytest.mark.parametrize(
    ("ours", "stock", "is_same"),
    [
        ("one two", "one two", True),
        ("one two", "one too", False),
        ("one two", "one two\ufffd", False),
        # The model wrote a part of a character at the end of its answer; the client's text ends before it.
        ("one two\ufffd<end>three", "one two<end>three", True),
        ("one two \ufffd<end>three", "one two<end>three", True),
        ("one two\ufffd\ufffd<end>three", "one two\ufffd\ufffd<end>three", True),
        ("one\ufffda\ufffd<end>three", "one<end>three", True),
        # What stands before a bad character, behind it, or between two, is compared all the same.
        ("one too\ufffd<end>three", "one two<end>three", False),
        ("one two\ufffd<end>three", "one two<end>thrive", False),
        ("one\ufffd<end>two<end>three\ufffd", "one<end>too<end>three", False),
        ("one two\ufffd<end>three", "one two<end>", False),
        ("one two\ufffd<end>three", "one two2<end>three", False),
        ("one two\ufffd<end>three", "one two and more<end>three", False),
    ],
)
def test_a_prompt_is_compared_but_for_its_bad_characters(ours, stock, is_same):
    """One bad character in a history leaves nothing else of it unseen."""
    assert is_same_text(ours, stock) is is_same


@pytest.mark.parametrize(
    ("ids", "text", "finish_reason", "stop", "is_right"),
    [
        ([7, 8, 9], "xyz", "length", (), True),
        ([7, 8], "xya", "stop", ("a",), True),
        ([], "", "stop", ("a",), False),
        ([], "", "length", (), False),
        ([7, 8], "xy", "length", (), False),
        ([7, 8], "xy", "stop", ("a",), False),
        ([7, 8], "xy", "stop", (), False),
        ([7, 8, 9], "xyz", "abort", (), False),
        ([7, 8, 9], "xyz", None, (), False),
        ([7, 8, 9, 9], "xyza", "stop", ("a",), False),
    ],
)
def test_a_whole_answer_is_as_long_as_it_must_be(ids, text, finish_reason, stop, is_right):
    """All tokens came, or the text has what ends it; no tokens are no answer."""
    chat = {"max_tokens": 3} | ({"stop": list(stop)} if stop else {})
    assert (wrong_end(ids, text, finish_reason, chat) == "") is is_right


CACHE = {"outcome": "local", "reason": "cheapest", "reused_tokens": 2, "fetched_tokens": 0, "computed_tokens": 1}


class FakeReference:
    """Renders every history as the same prompt, and says 700 behind anything."""

    def __init__(self, prompt_ids):
        self._prompt_ids = prompt_ids

    def prompt_ids(self, messages):
        """See `Reference`."""
        return self._prompt_ids

    def generate(self, prompt_ids, num_tokens):
        """See `Reference`."""
        return [Generated(700, {700: -0.1})] * num_tokens


def judged(*answers, prompt_ids=(500, 600)):
    """Judges that have judged these."""
    judges = Judges(FakeReference(list(prompt_ids)))
    for answer in answers:
        judges.hand_in(answer)
    judges.join()
    return judges


def make_answer(**changes):
    """A right answer of three tokens, but for the changes."""
    fields = {
        "session": "s",
        "turn": 1,
        "messages": [],
        "chat": {"max_tokens": 3},
        "prompt_ids": [500, 600],
        "ids": [700] * 3,
        "finish_reason": "length",
        "cache": CACHE,
    }
    return Answer(**{**fields, **changes})


def test_right_answers_are_counted():
    """With the way that each turn went, and why."""
    judges = judged(make_answer(), make_answer())
    assert (judges.num_answers, judges.num_wrong, judges.num_unfinished) == (2, 0, 0)
    assert judges.counts["reasons"] == {"cheapest": 2}
    assert judges.counts["tokens"] == {"reused": 4, "fetched": 0, "computed": 2}


@pytest.mark.parametrize(
    "changes",
    [
        {"ids": [700, 701, 700]},
        {"ids": []},
        {"ids": [700]},
        {"prompt_ids": [500, 601]},
        {"prompt_ids": []},
        {"ids": [700, 701], "finish_reason": None, "cache": None},
        {"prompt_ids": [500, 601], "ids": [], "finish_reason": None, "cache": None},
    ],
)
def test_a_wrong_answer_is_told(changes):
    """Other tokens, too few, or another prompt; of a stream that was left or broke, what came of it."""
    assert judged(make_answer(**changes)).num_wrong == 1


def test_a_stream_that_was_left_is_right_as_far_as_it_came():
    """It is compared, and no turn that was answered."""
    judges = judged(make_answer(ids=[700], finish_reason=None, cache=None))
    assert (judges.num_answers, judges.num_unfinished, judges.num_wrong) == (0, 1, 0)
    assert judges.counts["reasons"] == {}


def test_prompts_with_bad_characters_are_counted():
    """Token 111 is a part of a character: the prompt is compared without it, and the result says how often."""
    judges = judged(make_answer(prompt_ids=[500, 111, 600]), make_answer())
    assert (judges.num_bad_characters, judges.num_wrong) == (1, 0)
    assert judged(make_answer(prompt_ids=[500, 111, 601])).num_wrong == 1


# ---------------------------------------------------------------- the agents


def chunk(*ids, prompt_ids=None, finish_reason=None):
    """A chunk of a stream."""
    return {
        "prompt_token_ids": prompt_ids,
        "choices": [{"index": 0, "delta": {}, "token_ids": list(ids), "finish_reason": finish_reason}],
    }


def test_an_answer_adds_up_its_chunks():
    """The prompt comes first, the reason of the end last, and a chunk with the report has no choices."""
    answer = Answer("s", 1, [], {"max_tokens": 3})
    for one in (chunk(prompt_ids=[1, 2]), chunk(7, 8), chunk(9, finish_reason="length"), {"choices": []}):
        answer.take(one)
    assert (answer.prompt_ids, answer.ids, answer.finish_reason) == ([1, 2], [7, 8, 9], "length")


# ---------------------------------------------------------------- the result


def test_a_slope_is_that_of_the_straight_line():
    """Growth by 1 MB a minute is found whatever it starts from, and a constant does not grow."""
    assert slope_mb_per_min([(t, 5e8 + 1e6 * t / 60) for t in range(0, 300, 2)]) == pytest.approx(1.0)
    assert slope_mb_per_min([(t, 5e8) for t in range(10)]) == 0
    assert slope_mb_per_min([(1.0, 5e8)]) == 0


def test_every_life_of_an_engine_has_a_slope_of_its_own():
    """A restarted engine is small again: its smaller memory hides no growth of either life."""
    first = [Sample("decode", 1, t, int(9e8 + 2e6 * t / 60)) for t in range(100)]
    second = [Sample("decode", 2, 100 + t, int(1e8)) for t in range(100)]
    old = {1: -60.0, 2: -60.0}
    assert slopes([*first, *second], 0.0, old) == {"decode": pytest.approx(2.0, abs=0.01)}
    assert slopes([*first, *second], 100.0, old) == {"decode": pytest.approx(0.0, abs=0.01)}
    assert slopes(first[:5], 0.0, old) == {}


def test_a_young_engine_is_not_watched():
    """Memory that is touched for the first time is no leak: until a minute after its start nothing counts."""
    samples = [Sample("prefill", 1, t, 10**6 * min(t, 90)) for t in range(200)]
    assert slopes(samples, 0.0, {1: 30.0}) == {"prefill": pytest.approx(0.0, abs=0.01)}
    assert slopes(samples, 0.0, {1: -60.0})["prefill"] > 10
    assert slopes(samples, 0.0, {}) == {}


def test_a_curve_has_a_point_every_half_minute():
    """The file shows how memory went, without every sample."""
    samples = [Sample("decode", 1, float(t), 10**6 * t) for t in range(0, 70, 2)]
    assert curves(samples) == {"decode": [[0.0, 0.0], [30.0, 30.0], [60.0, 60.0]]}


def make_result(**changes):
    """A result that misses nothing, but for the changes."""
    fields = {
        "settings": {},
        "versions": {},
        "turns": 100,
        "wrong_answers": 0,
        "near_ties": 1,
        "unfinished_answers": 2,
        "prompts_with_bad_characters": 20,
        "faults_by_kind": {"P killed": 2, "D stopped": 3},
        "errors": {},
        "outcomes": {"fetched": 100},
        "reasons": {"cheapest": 68, "prefill_unavailable": 32},
        "tokens": {"fetched": 10},
        "stale_reads": 0,
        "blocks_leaked": 0,
        "rss_slope_mb_per_min_by_engine": {"prefill": 0.1, "decode": -0.1},
        "rss_mb": {},
        "reference_rss_slope_mb_per_min": 0.2,
        "engines_alive": True,
    }
    return SoakResult(**{**fields, **changes})


def test_a_good_soak_misses_nothing():
    """The file says so, and the table shows the numbers."""
    assert make_result().to_json()["passed"]
    assert "5 (D stopped 3, P killed 2)" in make_result().table()


def test_the_table_tells_why_turns_went_as_they_did():
    """And how many of them had no P at all: a soak of these alone would be one of D."""
    table = make_result().table()
    assert "cheapest 68, prefill_unavailable 32" in table
    assert "32 turns (32%)" in table
    assert "in 20 prompts" in table


def test_the_file_has_these_numbers():
    """Who reads `out/soak.json` finds each under its name, as one number; the memory is that of the worst engine."""
    content = json.loads(json.dumps(make_result().to_json()))
    types = {name: type(content[name]) for name in ("turns", "wrong_answers", "faults", "blocks_leaked")}
    assert set(types.values()) == {int}
    assert (content["faults"], content["turns"]) == (5, 100)
    assert content["rss_slope_mb_per_min"] == 0.1
    assert content["engines_alive"] is True


def test_memory_that_was_not_watched_has_no_number():
    """The other engine's would say nothing of it."""
    assert make_result(rss_slope_mb_per_min_by_engine={"decode": 0.1}).to_json()["rss_slope_mb_per_min"] is None


@pytest.mark.parametrize(
    "change",
    [
        {"turns": 0},
        {"wrong_answers": 1},
        {"blocks_leaked": 1},
        {"stale_reads": 1},
        {"engines_alive": False},
        {"rss_slope_mb_per_min_by_engine": {"prefill": 0.1, "decode": 1.0}},
        {"rss_slope_mb_per_min_by_engine": {"decode": 0.1}},
    ],
)
def test_every_bar_can_be_missed(change):
    """Any one of them spoils a soak."""
    result = make_result(**change)
    assert len(result.missed()) == 1
    assert not result.to_json()["passed"]


def test_what_an_engine_does_not_count_is_not_zero():
    """A name, or a series with these labels, that a scrape lacks is an error; labels that are not named add up."""
    scrape = '# HELP a text\na{engine="0",reason="x"} 2.0\na{engine="0",reason="y"} 3.0\na_more 9.0\nb 0.0\n'
    assert (total(scrape, "a"), total(scrape, "a", reason="y"), total(scrape, "b")) == (5.0, 3.0, 0.0)
    for name, labels in (("c", {}), ("a", {"reason": "z"}), ("b", {"reason": "x"})):
        with pytest.raises(LookupError, match=name):
            total(scrape, name, **labels)
