import gzip
import io
import json
from array import array

import pytest

from server_ext.analysis.formats import Parser
from server_ext.analysis.openai import parse_time
from server_ext.analysis.problems import PROBLEMS, Problems
from server_ext.analysis.requests import chain_blocks, num_shared_chunks
from server_ext.analysis.sources import InputError, find_files, read_file, read_lines
from tests.analysis.logs import SYSTEM, TOOLS, assistant, chat, ids, parse, trace, turns_of, user


def test_openai_lines_with_messages():
    """Id, times, counts, cached tokens and regions of a chat request, the body nested and the reply beside it."""
    line = {
        "start_time": "2026-01-02T03:04:05Z",
        "end_time": "2026-01-02T03:04:07+00:00",
        "request": {"model": "m", "messages": [SYSTEM, user("hi")], "tools": TOOLS, "metadata": {"session_id": "a"}},
        "response": {
            "id": "chatcmpl-1",
            "choices": [{"message": {"role": "assistant", "content": "yo"}, "finish_reason": "tool_calls"}],
            "usage": {"prompt_tokens": 300, "completion_tokens": 7, "prompt_tokens_details": {"cached_tokens": 128}},
        },
    }
    (request,), _ = parse([line])
    assert (request.session_id, request.request_id, request.model) == ("a", "chatcmpl-1", "m")
    assert request.end_s - request.start_s == 2
    assert (request.num_prompt_tokens, request.num_output_tokens, request.num_cached_tokens) == (300, 7, 128)
    assert request.ends_in_tool
    assert [part.kind.name for part in request.parts] == ["TOOL_DEF", "TOOL_DEF", "SYSTEM", "USER"]
    assert not request.is_estimated


@pytest.mark.parametrize("name", ["prompt_token_ids", "prompt", "input_ids"])
def test_openai_lines_with_token_ids(name):
    """A list of ids is exact: 130 ids are two full chunks of 64."""
    (request,), _ = parse([{"timestamp": 5, name: list(range(130)), "ttft_ms": 250}])
    assert request.num_prompt_tokens == 130
    assert len(request.chunk_ids) == 2
    assert (request.start_s, request.ttft_s) == (5, 0.25)


def test_headers_name_the_session():
    """A logged `X-Session-ID` counts as the session's id, however it is written."""
    (request,), _ = parse([{"headers": {"X-Session-ID": "h"}, "body": {"messages": [user("x")]}}])
    assert request.session_id == "h"


@pytest.mark.parametrize(
    "value", [1.7e9, 1.7e12, 1.7e15, 1.7e18, "1700000000", "2023-11-14T22:13:20Z", "2023-11-14T22:13:20"]
)
def test_times_in_every_unit(value):
    """Seconds, milliseconds, microseconds, nanoseconds and ISO 8601 are told apart."""
    assert parse_time(value) == pytest.approx(1.7e9)


@pytest.mark.parametrize("value", [True, None, [], "soon", float("nan"), float("inf")])
def test_what_is_no_time(value):
    """Anything else is no time, and no error."""
    assert parse_time(value) is None


def test_kv_cache_tester_traces():
    """A trace is a session with its own times; a sub-agent is a session of its own, at its own place in time."""
    inner = {"t": 1.0, "type": "n", "in": 64, "out": 1, "hash_ids": [9], "stop": "end_turn"}
    requests = [
        {
            "t": 0.0,
            "type": "n",
            "model": "m",
            "in": 130,
            "out": 10,
            "hash_ids": [1, 2],
            "api_time": 2.0,
            "stop": "tool_use",
        },
        {"t": 5.0, "type": "subagent", "agent_id": "agent_1", "requests": [inner]},
    ]
    (first, second), _ = parse([trace(requests, tool_tokens=64)])
    assert (first.session_id, first.end_s, len(first.chunk_ids), first.num_tool_tokens) == ("trace_1", 2.0, 2, 64)
    assert (second.session_id, second.start_s) == ("trace_1/agent_1", 6.0)
    assert (first.ends_in_tool, second.ends_in_tool) == (True, False)


def test_local_hashes_of_two_traces_are_not_the_same_blocks():
    """Block 1 of one trace is not block 1 of another where the trace says `local`."""
    one = {"t": 0, "in": 64, "out": 1, "hash_ids": [1]}
    (a, b), _ = parse([trace([one]), trace([one], id="trace_2")])
    assert num_shared_chunks(a.chunk_ids, b.chunk_ids) == 0


def test_mooncake_traces():
    """Milliseconds, blocks of 512, and no session: rows that begin alike are one."""
    rows = [
        {"timestamp": 0, "input_length": 1100, "output_length": 5, "hash_ids": [1, 2, 3]},
        {"timestamp": 2500, "input_length": 1600, "output_length": 5, "hash_ids": [1, 2, 4, 5]},
        {"timestamp": 3000, "input_length": 600, "output_length": 5, "hash_ids": [7, 8]},
    ]
    turns, _ = turns_of(rows)
    assert [(key, turn.turn) for key, turn, _ in turns] == [("prefix-1", 1), ("prefix-1", 2), ("prefix-2", 1)]
    assert turns[1][1].start_s == 2.5
    assert turns[1][1].shared_tokens == 1100 + 5


def test_mooncake_rows_that_continue_their_session():
    """A row with a delay instead of a time holds what is new; its history is the session's own."""
    rows = [
        {"session_id": "s", "input_length": 1000, "output_length": 24, "hash_ids": [1, 2]},
        {"session_id": "s", "delay": 2000, "input_length": 100, "output_length": 10, "hash_ids": [3]},
    ]
    turns, _ = turns_of(rows, decode_s_per_token=0.0)
    second = turns[1][1]
    assert (second.prompt_tokens, second.shared_tokens, second.gap_s) == (1124, 1024, 2.0)


def test_blocks_of_any_size_become_the_same_chunks():
    """Sixteen-token and 512-token blocks agree where their tokens do."""
    assert len(chain_blocks(list(range(10)), 16, 160)) == 2
    assert len(chain_blocks([1, 2], 512, 1024)) == 16
    assert len(chain_blocks([1, 2], 512, 1000)) == 8  # the last block is not full
    assert num_shared_chunks(chain_blocks([1, 2, 3], 96, 288), chain_blocks([1, 2, 9], 96, 288)) == 3


VLLM = [
    "INFO 11-30 01:02:03 [api_server.py:1] Started server process",
    "DEBUG 11-30 01:02:04 [l.py:55] Request chatcmpl-1 details: prompt: 'it\\'s', prompt_token_ids: [1, 2, 3], more.",
    "INFO 11-30 01:02:04 [l.py:66] Received request chatcmpl-1: params: SamplingParams(n=1), lora_request: None.",
    "INFO 11-30 01:02:06 [l.py:99] Generated response chatcmpl-1 (streaming complete): output_token_ids: [7, 8], end",
    "INFO 11-30 01:02:07 [l.py:66] Received request chatcmpl-2: params: SamplingParams(n=1), lora_request: None.",
    "INFO 01-01 00:00:01 [l.py:41] Received request cmpl-3: prompt: 'old form', params: P(), prompt_token_ids: [5, 6],",
]


def test_vllm_logs():
    """Lines of one request come together; the older form is one line; without a prompt (INFO only) it is counted."""
    (first, third), problems = parse(VLLM)
    assert (first.request_id, first.num_prompt_tokens, first.num_output_tokens) == ("chatcmpl-1", 3, 2)
    assert first.end_s - first.start_s == 2
    assert (third.request_id, third.num_prompt_tokens) == ("cmpl-3", 2)
    assert problems.counts == {"other_log_line": 1, "no_prompt": 1}


def test_vllm_logs_as_json_records():
    """The same lines wrapped by a JSON log formatter."""
    split = (line.split(" ", 4) for line in VLLM[1:4])
    records = [{"asctime": f"{day} {time}", "levelname": "INFO", "message": text} for _, day, time, _, text in split]
    (request,), _ = parse(records)
    assert request.end_s - request.start_s == 2


def test_a_prompt_in_text_alone():
    """A vLLM line without ids gives the text: its tokens are estimated."""
    (request,), _ = parse(
        ["DEBUG 11-30 01:02:04 Request r details: prompt: '" + "a" * 400 + "', prompt_token_ids: None,"]
    )
    assert (request.num_prompt_tokens, request.is_estimated) == (100, True)


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ('{"messages": [', "malformed_line"),
        ('{"messages": 5}', "malformed_line"),
        ('{"messages": {"a": 1}}', "malformed_line"),
        ('{"prompt_token_ids": [1, "x"]}', "malformed_line"),
        ('{"prompt_token_ids": [99999999999]}', "malformed_line"),
        ('{"hash_ids": [1]}', "malformed_line"),
        ('{"hash_ids": [1], "input_length": -5}', "malformed_line"),
        ('{"requests": [{"t": "x"}], "block_size": 64}', "malformed_line"),
        ('{"requests": [], "block_size": 0}', "malformed_line"),
        ("[1]", "malformed_line"),
        ('{"hello": "world"}', "unknown_format"),
        ('{"message": "hello"}', "unknown_format"),
        ("time,model,tokens", "unknown_format"),
        ('{"usage": {}}', "no_prompt"),
        ('{"request": {"model": "m"}}', "no_prompt"),
    ],
)
def test_bad_lines_are_counted_by_name(line, name):
    """Whatever a line holds, it is counted under a name, and the next line is read."""
    requests, problems = parse([line, chat([user("x")])])
    assert len(requests) == 1
    assert problems.counts == {name: 1}
    assert problems.first_seen[name].startswith("log:1")


def test_documents_behind_each_other():
    """Traces put together without a newline between them are all read, and what breaks off is counted."""
    one = json.dumps(trace([{"t": 0, "in": 64, "out": 1, "hash_ids": [1]}]))
    requests, problems = parse([one + one.replace("trace_1", "trace_2") + "{", chat([user("a }{ b")])])
    assert [request.session_id for request in requests] == ["trace_1", "trace_2", "s1"]
    assert problems.counts == {"malformed_line": 1}


def test_bytes_that_are_no_text():
    """Binary input is counted too."""
    problems = Problems()
    lines = [
        ("x:1", bytes(range(1, 256))),
        ("x:2", b"INFO Received request \xff: prompt: '\\x"),
        ("x:3", b'{"\xff": 1}'),
    ]
    assert list(Parser(problems).parse(lines)) == []
    assert problems.counts == {"unknown_format": 1, "malformed_line": 1, "no_prompt": 1}


def test_every_problem_has_a_meaning():
    """Names that are counted are names that are explained."""
    problems = Problems()
    for name in PROBLEMS:
        problems.add(name, "x:1")
    assert {one["name"] for one in problems.to_json()} == set(PROBLEMS)


def lines_of(path, problems=None):
    """The lines of a file."""
    return [line for _, line in read_file(path, problems or Problems(), lambda num_bytes: None)]


def test_a_document_over_many_lines_is_one(tmp_path):
    """A trace that was written for people, and a list of requests, are read as a whole."""
    document = tmp_path / "a.json"
    document.write_text(json.dumps(trace([{"t": 0, "in": 64, "out": 1, "hash_ids": [1]}]), indent=2))
    (line,) = lines_of(document)
    (request,) = Parser(Problems()).parse([("a:1", line)])
    assert request.session_id == "trace_1"
    document.write_text(json.dumps([ids(64, t=0), ids(64, t=1)], indent=2))
    assert len(list(Parser(Problems()).parse([("a:1", *lines_of(document))]))) == 2


def test_gzip_and_broken_gzip(tmp_path):
    """A compressed log is read; a damaged one is counted, with what came before the damage."""
    packed = gzip.compress(b"one\ntwo\n")
    (tmp_path / "a.jsonl.gz").write_bytes(packed)
    assert lines_of(tmp_path / "a.jsonl.gz") == [b"one", b"two"]
    (tmp_path / "a.jsonl.gz").write_bytes(packed[:12])
    problems = Problems()
    lines_of(tmp_path / "a.jsonl.gz", problems)
    assert problems.counts == {"unreadable_file": 1}


def test_folders_are_searched_and_other_files_counted(tmp_path):
    """Logs are told by their suffix, also in inner folders; the rest is named, not read."""
    (tmp_path / "deep").mkdir()
    for name in ("b.jsonl", "README.md", "deep/a.json.gz", "deep/photo.png"):
        (tmp_path / name).touch()
    problems = Problems()
    assert [path.name for path in find_files([str(tmp_path)], problems)] == ["b.jsonl", "a.json.gz"]
    assert problems.counts == {"ignored_file": 2}


def test_a_path_that_is_not_there(tmp_path):
    """A wrong path is an error that names it."""
    with pytest.raises(InputError, match="nowhere does not exist"):
        find_files([str(tmp_path / "nowhere")], Problems())


def test_lines_without_end(monkeypatch):
    """A line longer than any prompt is skipped whole, and the next one read."""
    monkeypatch.setattr("server_ext.analysis.sources.MAX_LINE_BYTES", 10)
    problems = Problems()
    stream = io.BytesIO(b"x" * 35 + b"\n\nshort\n" + b"y" * 11)
    assert [line for _, line in read_lines(stream, "f", problems)] == [b"short"]
    assert problems.counts == {"line_too_long": 2}
    assert list(read_lines(io.BytesIO(b"{\n" + b" " * 30 + b"}"), "f", problems)) == []


def test_shared_chunks_are_found_by_bisection():
    """Chained ids agree up to a point and never after it."""
    a, b = array("q", range(100)), array("q", [*range(37), *range(200, 263)])
    assert num_shared_chunks(a, b) == 37
    assert num_shared_chunks(a, a[:5]) == 5
    assert num_shared_chunks(a, array("q")) == 0


def test_replies_are_compared_whatever_their_json_looks_like():
    """An answer that comes back with other keys and spaces is the same answer."""
    call = {"id": "1", "type": "function", "function": {"name": "ls", "arguments": "{}"}}
    reply = {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None}
    first = chat([user("x")], response={"choices": [{"message": reply}]})
    again = {"tool_calls": [call], "role": "assistant"}
    turns, _ = turns_of([first, chat([user("x"), again, user("y")], t=5)])
    assert turns[1][2] is None
    turns, _ = turns_of([first, chat([user("x"), assistant("other"), user("y")], t=5)])
    assert turns[1][2].cause == "reply_rewritten"
