import io
import json
import os
import re
import signal
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from server_ext.analysis.html import to_html
from server_ext.analysis.openai import FIELDS
from server_ext.analysis.problems import Problems
from server_ext.analysis.report import NothingToAnalyze
from server_ext.analysis.sources import read_file
from server_ext.cli._analyze_text import show
from tests.analysis.logs import SYSTEM, assistant, chat, growing, report_of, tool, trace, user

NAMES = sorted({name for names in FIELDS.values() for name in names})
NAMES += ["messages", "prompt", "prompt_token_ids", "input", "tools", "system", "role", "content", "usage", "choices"]
NAMES += ["requests", "block_size", "hash_ids", "in", "out", "input_length", "output_length", "delay", "metadata"]
SCALARS = st.none() | st.booleans() | st.integers(-(10**12), 10**12) | st.floats() | st.text(max_size=6)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(NAMES), inner, max_size=5),
    max_leaves=12,
)
LINES = st.lists(st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=8), min_size=1, max_size=5)


@settings(max_examples=150, deadline=None)
@given(LINES)
def test_no_line_ends_a_run(lines):
    """Whatever stands under the names that are looked for, there is an answer, or nothing to analyze."""
    try:
        report = report_of(lines)
    except NothingToAnalyze:
        return
    json.dumps(report.to_json(), allow_nan=False)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.text(max_size=60) | st.just("Received request r: prompt: 'a', prompt_token_ids: [1]"), max_size=5))
def test_no_text_ends_a_run(lines):
    """Text of any kind is read as a log of vLLM, or counted."""
    try:
        report_of([line.replace("\n", " ") or "x" for line in lines])
    except NothingToAnalyze:
        return


def test_a_pipe_is_read_like_a_file():
    """What has no position, as a shell's process substitution, is read to its end."""
    reader, writer = os.pipe()
    try:
        os.write(writer, b"one\ntwo\n")
        os.close(writer)
        problems = Problems()
        path = Path(f"/dev/fd/{reader}")
        assert [line for _, line in read_file(path, problems, pytest.fail)] == [b"one", b"two"]
        assert not problems.counts
    finally:
        os.close(reader)


# -------------------------------------------------------------------- one odd value in a log that is good otherwise

ODD = ["", [], {}, None, -1, 0, 2**31, 2**63, 1e45, float("inf"), float("nan"), "x", [[1, 2]], True, "\ud800"]
_LIMIT_S = 10
"""Only so that a case fails and does not hang; one takes milliseconds."""


def conversation():
    """Three turns with all that an OpenAI-style log may say."""
    messages = [SYSTEM, user("fix it " * 100)]
    for number in range(3):
        reply = assistant(f"answer {number} " * 40)
        yield chat(
            list(messages),
            t=10.0 * number,
            request_id=f"r{number}",
            ttft_ms=80,
            usage={"prompt_tokens": 400 + 200 * number, "completion_tokens": 90, "cached_tokens": 64},
            response={"choices": [{"message": reply, "finish_reason": "tool_calls"}]},
        )
        messages += [reply, tool(f"result {number} " * 40)]


def blocks(first, num, **more):
    """A row of Mooncake's that has so many blocks."""
    return {"input_length": 512 * num, "output_length": 20, "hash_ids": [*range(first, first + num)], **more}


def inner(t, num_blocks, **more):
    """A request of a kv-cache-tester trace."""
    one = {"t": t, "type": "n", "model": "m", "in": 64 * num_blocks, "out": 20, "hash_ids": [*range(num_blocks)]}
    return one | {"api_time": 1.0, "ttft": 0.1, "stop": "tool_use"} | more


def vllm(fields):
    """A line of vLLM's log of these fields."""
    line = (
        f"DEBUG {fields['time']} [l.py:55] Received request {fields['id']}: prompt: {fields['prompt']}, params: P(), "
        f"prompt_token_ids: {fields['ids']},"
    )
    return line.encode(errors="replace").decode()


SUBAGENT = {"t": 25.0, "type": "subagent", "agent_id": "a", "requests": [inner(0.0, 3), inner(5.0, 5)]}
LOGS = {
    "messages": list(conversation()),
    "ids": growing([200, 420, 700], [0, 10, 20]),
    "kv-cache-tester": [trace([inner(0.0, 10), inner(10.0, 14), inner(20.0, 18), SUBAGENT], tool_tokens=64)],
    "mooncake, timed": [blocks(1, n, timestamp=1e4 * n, session_id="s", request_id=f"r{n}") for n in (2, 3, 4)],
    "mooncake, delayed": [blocks(n, 2, session_id="s", **({"delay": 2_000} if n else {})) for n in (0, 5, 9)],
    "mooncake, without ids": [blocks(1, n, timestamp=1e4 * n, block_size=512) for n in (2, 3, 4)],
    "vllm": [
        {"time": f"11-30 01:0{n}:00", "id": f"r{n}", "prompt": "'abc'", "ids": [*range(300 * n)]} for n in (1, 2, 3)
    ],
}


def places(value, path=()):
    """Every place within a JSON value; of a list, its first and its last item."""
    if path:
        yield path
    items = value.items() if isinstance(value, dict) else ()
    if isinstance(value, list):
        items = [(at, value[at]) for at in range(0, len(value), max(1, len(value) - 1))]
    for name, inside in items:
        yield from places(inside, (*path, name))


def changed(value, path, odd):
    """The value with `odd` at a place."""
    if not path:
        return odd
    copy = value.copy()
    copy[path[0]] = changed(value[path[0]], path[1:], odd)
    return copy


@contextmanager
def limited():
    """A block that fails where it would hang."""

    def give_up(_signal, _frame):
        msg = f"not done within {_LIMIT_S} s"
        raise TimeoutError(msg)

    before = signal.signal(signal.SIGALRM, give_up)
    signal.alarm(_LIMIT_S)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def analyze_all(lines, seen):
    """Analyze lines up to JSON, text and page; one that differs from one before in digits only is not written again."""
    try:
        report = report_of(lines)
    except NothingToAnalyze:
        return
    text = json.dumps(report.to_json(), allow_nan=False)
    shape = re.sub(r"\d", "0", re.sub(r'\d+\.\d+|"[0-9a-f]{16}"', "0", text))
    if shape in seen:
        return
    seen.add(shape)
    show(report, Console(file=io.TextIOWrapper(io.BytesIO(), encoding="utf-8"), width=160))
    to_html(report).encode()


@pytest.mark.parametrize("name", LOGS)
def test_one_odd_value_in_a_good_log(name):
    """Whatever stands in one field of one row of several good turns, all three forms of the report are written."""
    rows, failed, seen = LOGS[name], [], set()
    analyze_all([vllm(row) if name == "vllm" else row for row in rows], seen)
    assert seen, "the log is good without a change"
    middle = len(rows) // 2
    for path in places(rows[middle]):
        for odd in ODD:
            lines = [*rows[:middle], changed(rows[middle], path, odd), *rows[middle + 1 :]]
            try:
                with limited():
                    analyze_all([vllm(row) if name == "vllm" else row for row in lines], seen)
            except Exception as error:  # noqa: BLE001 (whatever it is, all cases are to be told at once)
                where = ".".join(map(str, path))
                failed.append(f"{where} = {odd!r}: {type(error).__name__}: {error!s:.100}")
    assert not failed, "\n".join(failed)
