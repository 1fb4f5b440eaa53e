"""Reading traces as planned sessions."""

import json

import pytest

from server_ext.analysis.problems import Problems
from server_ext.analysis.sources import InputError
from server_ext.traffic import PlannedTurn, prompts, read_sessions


def trace(name, requests):
    """Return a trace of the kv-cache-tester kind."""
    return {"id": name, "block_size": 64, "hash_id_scope": "local", "requests": requests}


def request(at_s, num_blocks, output, *, stop="tool_use", first_hash=0, api_time=2.0):
    """Return a request of so many blocks."""
    return {
        "t": at_s,
        "type": "n",
        "model": "m",
        "in": 64 * num_blocks,
        "out": output,
        "hash_ids": [first_hash + i for i in range(num_blocks)],
        "api_time": api_time,
        "stop": stop,
    }


def write(folder, name, requests):
    """Write a trace into a file."""
    (folder / f"{name}.json").write_text(json.dumps(trace(name, requests)))


def test_a_trace_becomes_a_session_of_gaps_and_deltas(tmp_path):
    """Gaps run from the end of a turn to the next, and what only appends has its answer in the history."""
    write(tmp_path, "a", [request(100, 10, 64), request(110, 13, 30, stop="end_turn"), request(200, 20, 5)])
    (session,) = read_sessions([str(tmp_path)], Problems())
    assert session.start_s == 0
    assert session.turns == (
        PlannedTurn(0.0, after_tool=False, delta_tokens=640, output_tokens=64),
        PlannedTurn(8.0, after_tool=True, delta_tokens=128, output_tokens=30),
        PlannedTurn(88.0, after_tool=False, delta_tokens=1280 - 832 - 30, output_tokens=5),
    )
    assert [prompt for prompt, _ in prompts(session)] == [640, 832, 1280]


def test_an_edited_history_says_what_is_kept(tmp_path):
    """A prompt that differs from its sixth block on keeps the five before it."""
    edited = request(110, 13, 30)
    edited["hash_ids"] = [*range(5), *range(900, 908)]
    write(tmp_path, "a", [request(100, 10, 64), edited])
    (session,) = read_sessions([str(tmp_path)], Problems())
    assert session.turns[1].kept_tokens == 5 * 64
    assert list(prompts(session)) == [(640, 0), (832, 320)]


def test_sessions_are_in_the_order_of_their_start(tmp_path):
    """Files are read by name, sessions come by time, counted from the first."""
    write(tmp_path, "a", [request(50, 4, 1)])
    write(tmp_path, "b", [request(20, 4, 1)])
    assert [session.start_s for session in read_sessions([str(tmp_path)], Problems())] == [0, 30]


def test_a_path_that_does_not_exist_is_an_error(tmp_path):
    """The error names the path."""
    with pytest.raises(InputError, match="nowhere"):
        read_sessions([str(tmp_path / "nowhere")], Problems())
