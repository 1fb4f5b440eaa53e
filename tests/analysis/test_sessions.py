import pickle
from contextlib import closing

import pytest

from server_ext.analysis.attic import Attic
from server_ext.analysis.problems import Problems
from server_ext.analysis.requests import Request
from server_ext.analysis.sessions import Sessions
from server_ext.analysis.turns import Spool
from tests.analysis.logs import SYSTEM, TOOLS, assistant, chat, growing, ids, tool, turns_of, user


def shape(turns):
    """[(session, turn number)] of turns."""
    return [(key, turn.turn) for key, turn, _ in turns]


def test_an_id_makes_a_session_whatever_it_says():
    """Requests with the same id are one session, in the order of the log."""
    turns, _ = turns_of(
        [chat([user("a")], session="x"), chat([user("b")], session="y"), chat([user("c")], session="x", t=9)]
    )
    assert shape(turns) == [("x", 1), ("y", 1), ("x", 2)]


def test_conversations_without_ids_are_told_by_their_beginning():
    """Two conversations with the same tools and system prompt stay apart, however short their messages are."""
    first, second = [SYSTEM, user("a")], [SYSTEM, user("b")]
    lines = [
        chat(first, session=None, tools=TOOLS),
        chat(second, session=None, tools=TOOLS, t=1),
        chat([*first, assistant("x"), user("more")], session=None, tools=TOOLS, t=2),
        chat([*second, assistant("y"), tool("z")], session=None, tools=TOOLS, t=3),
        chat(first, session=None, tools=TOOLS, t=4),
    ]
    turns, _ = turns_of(lines)
    # The last one only begins like the first: with nothing behind the first message it is new.
    assert shape(turns)[:4] == [("prefix-1", 1), ("prefix-2", 1), ("prefix-1", 2), ("prefix-2", 2)]
    assert shape(turns)[4] == ("prefix-3", 1)


def test_a_rewritten_history_is_still_its_conversation():
    """Without ids, an edited history is found by its first message."""
    history = [SYSTEM, user("a"), assistant("x"), tool("long " * 200), assistant("y"), user("b")]
    edited = [*history[:3], tool("cleared"), *history[4:], assistant("z"), user("c")]
    turns, _ = turns_of([chat(history, session=None), chat(edited, session=None, t=5)])
    assert shape(turns) == [("prefix-1", 1), ("prefix-1", 2)]
    assert turns[1][2].cause == "tool_result_rewritten"


def test_token_ids_without_session_ids_are_told_to_the_last_token():
    """Prompts that differ only behind their last full chunk are two sessions, and each finds its own."""
    common = list(range(640))
    one, two = [*common, 1, 2, 3], [*common, 4, 5, 6]
    lines = [
        ids(643, t=0, session=None, history=one),
        ids(643, t=1, session=None, history=two),
        ids(800, t=2, session=None, history=two, seed=7),
        ids(800, t=3, session=None, history=one, seed=8),
    ]
    turns, _ = turns_of(lines)
    assert shape(turns) == [("prefix-1", 1), ("prefix-2", 1), ("prefix-2", 2), ("prefix-1", 2)]
    assert turns[2][1].shared_tokens == 643


def test_a_growing_session_repeats_all_it_had():
    """Of the second prompt, all of the first and its answer is there already; the gap runs from end to start."""
    turns, _ = turns_of(growing([640, 1000], [0, 30], output=100, duration_s=4))
    second = turns[1][1]
    assert (second.shared_tokens, second.repeated_tokens, second.held_before) == (740, 640, 740)
    assert second.gap_s == pytest.approx(26)


def test_shared_tokens_are_never_more_than_the_prompt():
    """A prompt that goes back to less repeats at most itself."""
    turns, _ = turns_of(
        growing([1000], [0]) + growing([1000], [0])[:0] + [ids(640, t=5, history=list(range(100_000, 100_640)))]
    )
    assert turns[1][1].shared_tokens == 640


def test_another_model_shares_nothing():
    """KV of one model is of no use to another."""
    lines = growing([640, 1000], [0, 30])
    lines[1]["model"] = "other"
    turns, _ = turns_of(lines)
    assert turns[1][1].shared_tokens == 0
    assert turns[1][2].cause == "model_switched"


def test_duplicates_are_counted_and_skipped():
    """The same request id, or the same prompt at the same time, is one request."""
    line = chat([user("a")], request_id="r1")
    same = chat([user("b")], t=5)
    turns, problems = turns_of([line, line, same, same])
    assert len(turns) == 2
    assert problems.counts["duplicate_request"] == 2


def test_a_retry_later_is_a_turn():
    """The same prompt at another time was computed again, so it is a turn."""
    turns, problems = turns_of([chat([user("a")]), chat([user("a")], t=5)])
    assert len(turns) == 2
    assert "duplicate_request" not in problems.counts


@pytest.mark.parametrize(
    ("times", "name", "gap_s"),
    [
        ([100, 50], "clock_backwards", None),
        ([0, 1e6], "clock_forwards", None),
        ([0, 0.5], "overlapping_turn", 0.0),
        ([None, 0], "no_time", None),
    ],
)
def test_clocks_that_jump(times, name, gap_s):
    """What a clock cannot mean is counted by name, and its gap with no others."""
    lines = [chat([user("a")], t=t or 0) for t in times]
    for line, t in zip(lines, times, strict=True):
        if t is None:
            del line["timestamp"]
    turns, problems = turns_of(lines)
    assert problems.counts[name] == 1
    assert turns[1][1].gap_s == gap_s


def test_an_end_before_its_start_is_no_end():
    """A request that ends before it begins is taken to end when its output is done."""
    turns, problems = turns_of([chat([user("a")], duration_s=None, end_time=1.0, output=10)], decode_s_per_token=0.5)
    assert turns[0][1].end_s - turns[0][1].start_s == 5
    assert problems.counts["estimated_end"] == 1


def test_sessions_beyond_the_budget_are_found_again():
    """Only what was used last lies in memory; a session that returns is still known, from disk."""
    lines = [ids(6400, t=n, session=f"s{n}", seed=n) for n in range(50)]
    again = ids(6500, t=60, session="s0", history=lines[0]["prompt_token_ids"], seed=77)
    turns, _ = turns_of([*lines, again], max_state_bytes=10_000)
    assert shape(turns)[-1] == ("s0", 2)
    assert turns[-1][1].shared_tokens == 6400


def test_conversations_without_ids_are_bounded(monkeypatch):
    """Of too many conversations the one that was used longest ago cannot be continued any more, and is counted."""
    monkeypatch.setattr("server_ext.analysis.sessions._MAX_PREFIX_SESSIONS", 3)
    lines = [chat([SYSTEM, user(f"task {n}")], session=None, t=n) for n in range(5)]
    again = chat([SYSTEM, user("task 0"), assistant("x"), user("y")], session=None, t=9)
    turns, problems = turns_of([*lines, again])
    assert shape(turns)[-1] == ("prefix-6", 1)
    assert problems.counts["forgotten_session"] == 3


def test_no_content_is_remembered(monkeypatch):
    """What may go to disk of a prompt has none of its bytes, those that no full chunk covers neither."""
    kept, put = [], Attic.put

    def watch(attic, key, held):
        kept.append(pickle.dumps(held))
        put(attic, key, held)

    monkeypatch.setattr(Attic, "put", watch)
    turns_of([{"prompt": "the secret is 41", "timestamp": 1}, chat([user("the secret is 42")], session=None)])
    assert len(kept) == 2
    assert not any(b"secret" in one for one in kept)


USAGE = {"session_id": "u", "duration_s": 0.5}


@pytest.mark.parametrize(
    "lines",
    [
        [{**USAGE, "timestamp": n, "usage": {"prompt_tokens": 5000 + 1000 * n}} for n in (1, 2)],
        [{**USAGE, "timestamp": n, "messages": [], "usage": {"prompt_tokens": 5000 + 1000 * n}} for n in (1, 2)],
        [{"session_id": "u", "timestamp": n, "input_length": 5000 + n, "output_length": 9} for n in (1000, 2000)],
    ],
)
def test_lengths_alone_repeat_nothing(lines):
    """Nothing is invented where a log tells how long prompts are but not what is in them; it is counted."""
    turns, problems = turns_of(lines)
    (_, _, first_miss), (_, second, second_miss) = turns
    assert (second.turn, second.shared_tokens, second.repeated_tokens) == (2, 0, 0)
    assert (first_miss, second_miss) == (None, None)
    assert problems.counts["no_content"] == 2


def test_a_content_after_a_length_alone_repeats_nothing():
    """What is told of one prompt only cannot be compared, in either order."""
    told, length = ids(1000, t=5), {**USAGE, "session_id": "s1", "usage": {"prompt_tokens": 700}}
    for lines in ([{**length, "timestamp": 1}, told], [told, {**length, "timestamp": 1.7e9 + 9}]):
        turns, problems = turns_of(lines)
        assert (turns[1][1].shared_tokens, turns[1][2]) == (0, None)
        assert problems.counts["no_content"] == 1


@pytest.mark.parametrize(("again", "shared"), [("x" * 100, 0), ("y" * 100 + "more", 25)])
def test_prompts_shorter_than_a_chunk_are_compared(again, shared):
    """Where no chunk is full, the bytes tell whether a prompt goes on with the one before it."""
    lines = [
        {"session_id": "u", "timestamp": n, "duration_s": 0.1, "prompt": text}
        for n, text in enumerate(["y" * 100, again])
    ]
    turns, _ = turns_of(lines)
    assert turns[1][1].shared_tokens == shared


def test_prompts_shorter_than_a_chunk_are_not_duplicates():
    """Two short prompts of the same length at the same time are two requests."""
    turns, problems = turns_of([{"session_id": "u", "timestamp": 1, "prompt": text} for text in ("yes?", "no??")])
    assert len(turns) == 2
    assert "duplicate_request" not in problems.counts


def deltas(num_tokens, *, number=4):
    """Rows of one session that claim to bring so many tokens each."""
    return [
        Request(where=f"x:{n}", session_id="s", is_delta=True, num_prompt_tokens=num_tokens, num_output_tokens=1 << 31)
        for n in range(number)
    ]


def test_claims_of_any_length_fit_the_columns():
    """What a log claims, and what its deltas add up to, is cut to what the columns hold."""
    with closing(Sessions(Problems())) as sessions, closing(Spool()) as spool:
        for _, turn, _ in sessions.turns([*deltas(1 << 31), *deltas(-5, number=1)]):
            spool.append(turn)
        rows = spool.sample(9)
    assert rows["prompt"].tolist() == [(1 << 30) - 1] * 5
    assert rows["held"].tolist() == [0] + [(1 << 31) - 2] * 4
    assert rows["shared"].tolist() == [0] + [(1 << 30) - 1] * 4


def test_ids_of_a_claimed_history_are_bounded(monkeypatch):
    """A claimed history is not made longer than any context."""
    monkeypatch.setattr("server_ext.analysis.sessions._MAX_CONTINUED_CHUNKS", 10)
    requests = deltas(6400)
    with closing(Sessions(Problems())) as sessions:
        assert len(list(sessions.turns(requests))) == 4
    assert [len(request.chunk_ids) for request in requests] == [0, 10, 10, 10]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("start_s", 1.7e18),
        ("start_s", float("nan")),
        ("delay_s", float("inf")),
        ("end_s", 1e300),
        ("end_s", 1.7e9 + 8 * 24 * 3600),
        ("ttft_s", 1e42),
        ("ttft_s", -1.0),
    ],
)
def test_times_that_cannot_be(name, value):
    """A time that no clock shows is counted, and taken as not told."""
    start_s = None if name == "delay_s" else 1.7e9
    request = Request(where="x:1", num_prompt_tokens=9, data=b"x", **{"start_s": start_s} | {name: value})
    problems = Problems()
    with closing(Sessions(problems)) as sessions:
        ((_, turn, _),) = sessions.turns([request])
    assert problems.counts["impossible_time"] == 1
    if name in {"start_s", "delay_s"}:
        assert (turn.start_s, turn.end_s, problems.counts["no_time"]) == (None, None, 1)
    elif name == "end_s":
        assert turn.end_s == turn.start_s  # estimated
    else:
        assert turn.ttft_s is None
