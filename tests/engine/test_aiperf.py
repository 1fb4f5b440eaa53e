"""AIPerf against D's chat route, with the example's configuration: its conversations are sessions.

`make integrations` makes its environment. What was served is judged by AIPerf's own report and records, and by what D
says of its sessions.
"""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import dataclass
from itertools import groupby, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from server_ext.launch.tiny import TINY, ensure_tiny

if TYPE_CHECKING:
    from .rig import Rig

ROOT = Path(__file__).parents[2]
AIPERF = ROOT / ".venvs/aiperf/bin/aiperf"
CONFIG = ROOT / "examples/load/aiperf.yaml"
NUM_CONVERSATIONS, NUM_TURNS = 6, 5
DEADLINE_S = 300


@dataclass
class Request:
    """One request in AIPerf's records."""

    conversation: str
    """What it sent as the session's id."""
    turn: int
    """From 0 on."""
    prompt_tokens: int
    cached_tokens: int
    answer_tokens: int


def drive(rig: Rig, folder: Path) -> tuple[dict[str, Any], list[list[Request]]]:
    """Run the example, and return AIPerf's report and the requests of each conversation in their order."""
    assert AIPERF.exists(), f"no {AIPERF}: run `make integrations` first"
    options = {"--config": CONFIG, "--url": rig.stack.url, "--model": TINY, "--tokenizer": ensure_tiny()}
    argv = [str(AIPERF), "profile", "--artifact-dir", str(folder)]
    argv += [str(word) for option in options.items() for word in option]
    env = {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"}
    done = subprocess.run(argv, cwd=folder, env=env, capture_output=True, text=True, check=False, timeout=DEADLINE_S)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((folder / "profile_export_aiperf.json").read_text("utf-8"))
    lines = (folder / "profile_export.jsonl").read_text("utf-8").splitlines()
    requests = sorted(map(read, lines), key=lambda one: (one.conversation, one.turn))
    return report, [list(some) for _, some in groupby(requests, lambda one: one.conversation)]


def read(line: str) -> Request:
    """Read a record; the counts are those of the server's `usage`."""
    record = json.loads(line)
    metrics, metadata = record["metrics"], record["metadata"]
    return Request(
        conversation=metadata["x_correlation_id"],
        turn=metadata["turn_index"],
        prompt_tokens=metrics["usage_prompt_tokens"]["value"],
        # Nothing where nothing was cached.
        cached_tokens=metrics.get("usage_prompt_cache_read_tokens", {"value": 0})["value"],
        answer_tokens=metrics["usage_completion_tokens"]["value"],
    )


def test_conversations_are_sessions(wide: Rig, tmp_path: Path) -> None:
    """Every request succeeds; from the second turn on all before it is fetched, the model's own answers included."""
    report, conversations = drive(wide, tmp_path)
    num_requests = NUM_CONVERSATIONS * NUM_TURNS
    assert (report["request_count"]["avg"], report["is_complete"]) == (num_requests, True)
    assert (report["error_summary"], report["request_error_rate"]["avg"]) == ([], 0)

    assert [len(requests) for requests in conversations] == [NUM_TURNS] * NUM_CONVERSATIONS
    for requests in conversations:
        assert requests[0].answer_tokens == 32
        for before, request in pairwise(requests):
            # The last token of an answer is not in the cache. Other text in the answer's place would end it before.
            assert request.cached_tokens == before.prompt_tokens + before.answer_tokens - 1
            assert request.prompt_tokens > request.cached_tokens

    sessions = {one["session"]: one for one in wide.sessions()}
    assert set(sessions) == {requests[0].conversation for requests in conversations}
    for requests in conversations:
        session, last = sessions[requests[0].conversation], requests[-1]
        cache = session["last_turn"]
        assert (session["turn"], session["lease"]["state"]) == (NUM_TURNS, "active")
        assert (cache["outcome"], cache["diverged_at"]) == ("fetched", None)
        assert (cache["prompt_tokens"], cache["fetched_tokens"]) == (last.prompt_tokens, last.cached_tokens)
