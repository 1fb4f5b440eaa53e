import codecs
import io
import json

import pytest

from server_ext.analysis.formats import Parser
from server_ext.analysis.problems import Problems
from server_ext.analysis.report import NothingToAnalyze
from server_ext.analysis.sources import read_lines
from tests.analysis.logs import chat, parse, report_of, trace, turns_of, user


@pytest.mark.parametrize(
    "line",
    [
        r"INFO Received request r: prompt: 'C:\users', x",
        json.dumps({"asctime": "11-30 01:02:04", "message": "Received request r: prompt: 'secret\nline', x"}),
        "INFO Received request r: prompt: 'a', prompt_token_ids: [1, , 2], x",
    ],
)
def test_a_prompt_that_no_python_wrote(line):
    """A prompt of a text log that cannot be unquoted is one malformed line; the request's next line is read."""
    requests, problems = parse([line, "INFO Received request r: prompt: 'abcd', prompt_token_ids: [1, 2], x"])
    assert [request.num_prompt_tokens for request in requests] == [2]
    assert problems.counts == {"malformed_line": 1}
    assert problems.first_seen == {"malformed_line": "log:1"}


def row(**more):
    """A Mooncake row."""
    return {"timestamp": 0, "input_length": 64, "output_length": 1} | more


def inner(**more):
    """A trace with one request."""
    return trace([{"t": 0, "in": 64, "out": 1, "hash_ids": [1]} | more])


@pytest.mark.parametrize(
    "item",
    [
        row(input_length=3_000_000_000),
        row(input_length=10**30),
        row(output_length=(1 << 29) + 1),
        row(session_id="s", delay=5, input_length=10**12),
        row(input_length=64.5),
        row(input_length=1 << 29, hash_ids=[1], block_size=1 << 29),
        row(timestamp=1.7e18),
        row(delay=-1e16),
        inner(**{"in": 3_000_000_000}),
        inner(**{"in": -100}),
        inner(out=-1),
        inner(ttft=-0.5),
        inner(t=1.7e18),
        inner(api_time=1.7e18),
        trace([{"t": 0, "in": 1 << 29, "hash_ids": [1]}], block_size=1 << 29),
        trace([], tool_tokens=-1),
    ],
    ids=str,
)
def test_numbers_that_no_trace_has(item):
    """Counts that no context holds, blocks that none has and times that no clock shows make a malformed line."""
    requests, problems = parse([item, chat([user("x")])])
    assert [request.session_id for request in requests] == ["s1"]
    assert problems.counts == {"malformed_line": 1}


def test_an_empty_id_is_none():
    """Rows whose ids are empty are neither the same request nor the same session; 0 is an id."""
    rows = [row(timestamp=t, input_length=512, hash_ids=[t], request_id="", session_id="") for t in (1, 2, 3)]
    turns, problems = turns_of(rows)
    assert [(key, turn.turn) for key, turn, _ in turns] == [("prefix-1", 1), ("prefix-2", 1), ("prefix-3", 1)]
    assert "duplicate_request" not in problems.counts
    (request,), _ = parse([row(session_id=0, request_id=0)])
    assert (request.session_id, request.request_id) == ("0", "0")


@pytest.mark.parametrize("more", [{"input_length": 3, "output_length": 5}, {"hash_ids": [1]}])
@pytest.mark.parametrize(
    "prompt",
    [{"messages": [user("x")]}, {"prompt": "x"}, {"body": {"messages": [user("x")]}}],
    ids=["chat", "text", "body"],
)
def test_a_row_with_its_prompt_is_no_trace(prompt, more):
    """A request that is logged with its prompt keeps it and its seconds, whatever else the log says of it."""
    (request,), problems = parse([prompt | more | {"timestamp": 1.7e9, "session_id": "s"}])
    assert (request.start_s, bool(request.data)) == (1.7e9, True)
    assert not problems.counts


def test_a_trace_may_have_empty_prompts():
    """A row whose exporter writes null for the prompts that it does not have is a row of a trace."""
    (request,), _ = parse([row(messages=None, prompt=None, timestamp=1000)])
    assert (request.start_s, request.num_prompt_tokens) == (1.0, 64)


@pytest.mark.parametrize("size", [16, 32, 64, 128, 256, 512, 1024])
@pytest.mark.parametrize("is_last_hashed", [False, True])
def test_the_block_size_of_a_row_is_told_by_its_hashes(size, is_last_hashed):
    """Prompts of 33 1/4 blocks that agree in 20 of them share 20 blocks of their own size, not of 512."""
    num_tokens, num_hashes = 33 * size + size // 4, 33 + is_last_hashed
    rows = []
    for t in (0, 9000):
        hashes = [*range(20), *range(100 + t, 100 + t + num_hashes - 20)]
        rows.append(row(timestamp=t, input_length=num_tokens, hash_ids=hashes, session_id="s"))
    turns, problems = turns_of(rows)
    assert turns[1][1].shared_tokens == 20 * size
    assert "hash_mismatch" not in problems.counts


@pytest.mark.parametrize(
    "item", [row(input_length=6400, hash_ids=[1] * 5), row(input_length=640, hash_ids=[1] * 10, block_size=32)], ids=str
)
def test_hashes_that_fit_no_block_size(item):
    """A row whose hashes are more or fewer than its blocks is counted, not guessed."""
    requests, problems = parse([item, row(input_length=960, hash_ids=[1] * 10, block_size=96)])
    assert [len(request.chunk_ids) for request in requests] == [15]
    assert problems.counts == {"hash_mismatch": 1}


@pytest.mark.parametrize("between", [", ", ""])
def test_a_bad_document_does_not_take_the_others_with_it(between):
    """Of a list, and of documents behind each other, all are read but the bad ones, which are counted."""
    documents = [chat([user("a")]), {"messages": 5}, {"hash_ids": [1] * 9, "input_length": 3}, chat([user("b")])]
    line = between.join(map(json.dumps, documents))
    requests, problems = parse([f"[{line}, 7, []]" if between else line])
    assert [request.data[-4:-2] for request in requests] == [b'"a', b'"b']
    assert problems.counts == {"malformed_line": 3 if between else 1, "hash_mismatch": 1}


def test_lines_of_a_log_that_are_no_requests():
    """Other lines of a text log are skipped and counted: of a file with nothing else it is said what it was."""
    lines = ["INFO started", f"ERROR {json.dumps(chat([user('x')]))}", "WARNING slow"]
    requests, problems = parse(lines)
    assert (requests, problems.counts) == ([], {"other_log_line": 3})
    with pytest.raises(NothingToAnalyze, match="3 x other_log_line"):
        report_of(lines)


@pytest.mark.parametrize("indent", [None, 1])
def test_a_byte_order_mark_is_no_part_of_a_line(indent):
    """A file that begins with a byte order mark loses nothing, be it lines or one document over many."""
    text = json.dumps([chat([user("a")])], indent=indent)
    stream = io.BytesIO(codecs.BOM_UTF8 + text.encode() + b"\n")
    problems = Problems()
    assert len(list(Parser(problems).parse(read_lines(stream, "f", problems)))) == 1
    assert not problems.counts


def nested(depth):
    """A trace whose sub-agents lie so deep in each other; each session has one request, a second after its start."""
    requests = []
    for _ in range(depth + 1):
        one = {"t": 1.0, "in": 64, "out": 1, "hash_ids": [1]}
        requests = [one, {"t": 10.0, "type": "subagent", "agent_id": "a", "requests": requests}]
    return trace(requests)


def test_sub_agents_of_sub_agents():
    """Each is a session, at its place in time; where they never end, the trace is malformed and read in no part."""
    requests, problems = parse([nested(2)])
    assert [(one.session_id, one.start_s) for one in requests] == [
        ("trace_1", 1.0),
        ("trace_1/a", 11.0),
        ("trace_1/a/a", 21.0),
    ]
    assert not problems.counts
    assert len(parse([nested(16)])[0]) == 17
    requests, problems = parse([nested(17)])
    assert (requests, problems.counts) == ([], {"malformed_line": 1})
