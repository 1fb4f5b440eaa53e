import pytest

from bidikv_sdk.wire import REASONS
from server_ext.analysis.misses import CAUSES
from tests.analysis.logs import SYSTEM, TOOLS, assistant, chat, growing, ids, report_of, tool, trace, turns_of, user

HISTORY = [
    SYSTEM,
    user("fix it " * 40),
    assistant("reading " * 40),
    tool("file " * 90),
    assistant("done"),
    user("next " * 30),
]
EDITED = {**TOOLS[1], "function": {"name": "cat", "description": "changed"}}
LONG = [*HISTORY, assistant("a " * 90), user("b " * 90), assistant("c " * 90), user("d " * 90)]


def system(text):
    """Another system prompt."""
    return {"role": "system", "content": text}


def miss_of(before, after, *, tools=(TOOLS, TOOLS), **more):
    """The miss of the second of two turns."""
    lines = [chat(before, tools=tools[0], output=0), chat(after, tools=tools[1], t=9, output=0)]
    turns, _ = turns_of(lines, **more)
    return turns[1][2]


@pytest.mark.parametrize(
    ("cause", "region", "after", "tools"),
    [
        ("tools_reordered", "tools[0]", HISTORY, TOOLS[::-1]),
        ("tools_added_or_removed", "tools[1]", HISTORY, TOOLS[:1]),
        ("tools_added_or_removed", "system", HISTORY, [*TOOLS, EDITED]),
        ("tool_edited", "tools[1]", HISTORY, [TOOLS[0], EDITED]),
        ("system_edited", "system", [system("Be kind."), *HISTORY[1:]], TOOLS),
        ("message_edited", "message 1", [SYSTEM, user("fix it now " * 40), *HISTORY[2:]], TOOLS),
        ("reply_rewritten", "message 2", [*HISTORY[:2], assistant("reading"), *HISTORY[3:], user("e " * 200)], TOOLS),
        ("tool_result_rewritten", "message 3", [*HISTORY[:3], tool("cleared"), *HISTORY[4:], user("e " * 200)], TOOLS),
        ("message_inserted", "message 1", [SYSTEM, user("remember"), *HISTORY[1:]], TOOLS),
    ],
)
def test_every_cause_is_told_from_the_messages(cause, region, after, tools):
    """One change in the second turn: its cause, where it is, and what it costs."""
    miss = miss_of(HISTORY, after, tools=(TOOLS, tools))
    assert (miss.cause, miss.region) == (cause, region)
    assert miss.lost_tokens > 0
    assert miss.old_content is None


def test_a_date_in_the_system_prompt():
    """Where only numbers and names of days differ, the fix is another one."""
    before = [system("Today is Monday, 2026-11-30 12:00."), *HISTORY[1:]]
    after = [system("Today is Tuesday, 2026-12-01 08:30."), *HISTORY[1:], user("more")]
    assert miss_of(before, after).cause == "system_numbers"


def test_a_window_that_moves():
    """Old messages dropped in front of kept ones."""
    miss = miss_of(LONG, [SYSTEM, *LONG[3:], user("e " * 90)])
    assert (miss.cause, miss.region) == ("messages_dropped", "message 1")


def test_a_history_that_was_summarized():
    """A prompt well below the one before it."""
    miss = miss_of(LONG, [SYSTEM, user("summary")])
    assert (miss.cause, miss.region) == ("compacted", "message 1")


def test_tokens_lost_are_those_behind_the_difference():
    """The tokens held, less those that still agree."""
    lines = [ids(6400, t=0), ids(6500, t=9, history=list(range(640)), seed=3)]
    turns, _ = turns_of(lines)
    miss = turns[1][2]
    assert (miss.at_token, miss.lost_tokens, miss.region) == (640, 5760, "history of turn 1")


def test_appending_is_no_miss():
    """A history that only grows, with the answer in it, loses nothing."""
    assert miss_of(HISTORY, [*HISTORY, assistant("ok"), user("thanks")]) is None


@pytest.mark.parametrize("after", [HISTORY, HISTORY[:3]])
def test_a_retry_is_no_miss(after):
    """A prompt sent again, or a step back in it, is there to its end, whatever was answered to it."""
    lines = [chat(HISTORY, output=50), chat(after, t=9, output=50)]
    turns, _ = turns_of(lines)
    assert (turns[1][1].turn, turns[1][2]) == (2, None)


def test_token_logs_name_the_turn_that_brought_what_changed():
    """Without messages the region is the turn whose text is no longer repeated."""
    lines = growing([640, 1280, 1920], [0, 10, 20])
    changed = lines[2]["prompt_token_ids"][:1000]
    turns, _ = turns_of([*lines, ids(2000, t=30, history=changed, seed=9)])
    miss = turns[3][2]
    assert (miss.region, miss.at_token, miss.lost_tokens) == ("history of turn 2", 960, 960)


@pytest.mark.parametrize(
    ("num_shared", "cause", "region"), [(1, "tool_edited", "tools"), (5, "system_edited", "system")]
)
def test_traces_that_say_how_long_tools_and_system_are(num_shared, cause, region):
    """Hashes alone tell the region where the trace gives its length."""
    blocks = list(range(20))
    after = blocks[:num_shared] + list(range(100, 116))
    requests = [
        {"t": 0.0, "in": 1280, "out": 0, "hash_ids": blocks},
        {"t": 9.0, "in": 64 * len(after), "out": 0, "hash_ids": after},
    ]
    turns, _ = turns_of([trace(requests, tool_tokens=256, system_tokens=256)])
    assert (turns[1][2].cause, turns[1][2].region) == (cause, region)


def test_text_prompts_have_no_regions():
    """A completion's prompt that grows loses nothing; one that changes is told by the turn that brought it."""
    text = "".join(f"line {n} of the file\n" for n in range(200))
    grown = {"prompt": text + "more", "session_id": "s", "timestamp": 9}
    lines = [{"prompt": text, "session_id": "s", "timestamp": 0}, grown]
    turns, _ = turns_of(lines)
    assert turns[1][2] is None
    turns, _ = turns_of([*lines, {**grown, "prompt": text[:2000] + "other" + text[2000:], "timestamp": 19}])
    assert (turns[2][2].region, turns[2][2].at_token) == ("history of turn 1", 448)


def test_contents_only_on_request():
    """By default a miss has hashes; with contents kept it quotes around the difference."""
    before, after = [user("the secret is 41" + "." * 300)], [user("the secret is 42" + "." * 300)]
    miss = miss_of(before, after)
    assert miss.old_content is None
    assert "secret" not in str(miss.to_json())
    assert miss.old_hash != miss.new_hash
    miss = miss_of(before, after, keep_texts=True)
    assert "41" in miss.old_content
    assert "42" in miss.new_content


def test_misses_are_summed_by_cause():
    """A report counts turns and tokens by cause, and names the costliest."""
    lines = [chat(HISTORY, output=0), chat([SYSTEM, user("other " * 99), *HISTORY[2:]], t=9, output=0)]
    found = report_of(lines).to_json()["misses"]
    assert [(one["cause"], one["count"]) for one in found["causes"]] == [("message_edited", 1)]
    assert found["examples"][0]["session"] == "s1"
    assert found["examples"][0]["turn"] == 2
    assert found["causes"][0]["lost_tokens"] == found["examples"][0]["lost_tokens"]


def test_every_cause_has_a_word_of_the_wire_and_a_fix():
    """Causes are finer than the server's reasons, and each belongs to one."""
    assert all(cause.reason in REASONS and cause.fix for cause in CAUSES.values())
