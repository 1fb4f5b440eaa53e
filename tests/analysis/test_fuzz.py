import json
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from server_ext.analysis.openai import FIELDS
from server_ext.analysis.problems import Problems
from server_ext.analysis.report import NothingToAnalyze
from server_ext.analysis.sources import read_file
from tests.analysis.logs import report_of

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
