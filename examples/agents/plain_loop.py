"""The loop that every agent is: the model asks for tools until it answers. Its context stays where it was computed.

    BIDIKV_BASE_URL=http://127.0.0.1:8200/v1 python examples/agents/plain_loop.py "How many lines of Python are here?"

A turn sends only what is new: the question, then the tools' results. While the tools run, `hold` keeps the lease alive.
"""

import json
import sys
from pathlib import Path
from typing import Any

from bidikv_sdk import BidiKV, Session, Turn

PATH = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}


def list_files(path: str) -> str:
    """List the files in a folder."""
    return "\n".join(sorted(entry.name + "/" * entry.is_dir() for entry in Path(path).iterdir()))


def read_file(path: str) -> str:
    """Read a file, its first 2,000 characters."""
    return Path(path).read_text("utf-8", errors="replace")[:2000]


TOOLS = {tool.__name__: tool for tool in (list_files, read_file)}
DEFINITIONS = [
    {"type": "function", "function": {"name": name, "description": tool.__doc__, "parameters": PATH}}
    for name, tool in TOOLS.items()
]


def run_tool(call: dict[str, Any]) -> dict[str, Any]:
    """Return the message that answers a tool call; what goes wrong is for the model to read."""
    try:
        output = TOOLS[call["function"]["name"]](**json.loads(call["function"]["arguments"]))
    except (OSError, KeyError, TypeError, ValueError) as error:
        output = f"{type(error).__name__}: {error}"
    return {"role": "tool", "tool_call_id": call["id"], "content": output}


def answer(session: Session, question: str) -> Turn:
    """Let the model use its tools until it answers."""
    turn = session.send(question)
    while turn.tool_calls:
        with session.hold():
            results = [run_tool(call) for call in turn.tool_calls]
        turn = session.send(results)
    return turn


if __name__ == "__main__":
    with BidiKV() as client, client.session(system="Look before you answer.", tools=DEFINITIONS) as session:
        turn = answer(session, " ".join(sys.argv[1:]) or "Which files are here?")
        print(f"{turn.text}\n-- turn {turn.turn}: {turn.cache.outcome}, {turn.cache.computed_tokens} tokens computed")
