"""A coding agent whose context stays in the decode engine's memory between its turns.

    BIDIKV_BASE_URL=http://127.0.0.1:8200/v1 python examples/agents/coding_agent.py

A turn sends only what is new. The engine still holds the KV cache of all that was said before, under a lease, and
`session.hold()` keeps that lease alive for as long as a tool runs.
"""

import json
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from bidikv_sdk import BidiKV, Session, Turn

HERE = Path(__file__).parent
REPO = HERE / "sample_repo"
GUIDELINES = (REPO / "AGENTS.md").read_text("utf-8")
CHAT: dict[str, Any] = {"temperature": 0, "min_tokens": 32, "max_completion_tokens": 32}

# A model of 135M parameters is not up to choosing tools, so a script says which tool runs in which turn. It never
# says what the model answers. With a capable model, `turn.tool_calls` takes its place.
SCRIPT = json.loads((HERE / "script.json").read_text("utf-8"))


def run_tool(command: str) -> str:
    """Run a command in the repository and return what it prints."""
    argv = [sys.executable if word == "python" else word for word in shlex.split(command)]
    done = subprocess.run(argv, cwd=REPO, capture_output=True, text=True, check=False)  # noqa: S603 - our own script
    return f"$ {command}\n{done.stdout}{done.stderr}exit status {done.returncode}"


def ask(session: Session, delta: str) -> Turn:
    """Run one turn, printing the answer as it arrives."""
    with session.stream(delta) as stream:
        for text in stream.text_stream:
            print(text, end="", flush=True)
        return stream.final_turn()


def run(session: Session, ask: Callable[[Session, str], Turn] = ask) -> Iterator[Turn]:
    """Work through the task, one turn after the other."""
    yield ask(session, SCRIPT["task"])
    for command, question in SCRIPT["steps"]:
        with session.hold():
            output = run_tool(command)
        yield ask(session, f"{output}\n\n{question}")


if __name__ == "__main__":
    with BidiKV() as client, client.session(system=GUIDELINES, **CHAT) as session:
        for turn in run(session):
            print(f"\n-- {turn.cache.outcome}: {turn.cache.computed_tokens} of {turn.cache.prompt_tokens} computed\n")
