"""Each folder here belongs to one of the frameworks' environments; `make integrations` runs it there."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from bidikv_sdk.testing import FakeServer

DEADLINE_S = 60.0
FRAMEWORKS = {"in_langchain": "langchain", "in_agents": "agents", "in_llamaindex": "llama_index"}

# A run of a single folder that finds no tests is an error, so none of them is left out unseen.
collect_ignore = [str(Path(__file__).parent / folder) for folder, module in FRAMEWORKS.items() if not find_spec(module)]
# `tests/engine` runs this one, where there is a server.
if "BIDIKV_BASE_URL" not in os.environ:
    collect_ignore.append(str(Path(__file__).parent / "on_engines"))


@pytest.fixture
def server() -> FakeServer:
    """A server; it answers with the text of the last message where nothing is scripted."""
    return FakeServer()


@pytest.fixture
def url(server: FakeServer) -> Iterator[str]:
    """Where it is, for clients with a real socket."""
    with server.serve() as url:
        yield url


@pytest.fixture
def is_renewed(server: FakeServer) -> Callable[[], bool]:
    """Asks whether a lease has been renewed; fails where that takes too long."""
    end_s = time.monotonic() + DEADLINE_S

    def ask() -> bool:
        assert time.monotonic() < end_s, f"no renewal within {DEADLINE_S:g} s"
        return any(request.verb == "extend" for request in server.requests)

    return ask


@pytest.fixture
def run_example(url: str) -> Callable[[str], str]:
    """Runs a module in a process of its own, in this environment, and returns what it prints."""
    env = {**os.environ, "BIDIKV_BASE_URL": url, "BIDIKV_MODEL": "fake", "OPENAI_AGENTS_DISABLE_TRACING": "1"}

    def run(module: str) -> str:
        argv = [sys.executable, "-m", module]
        root = Path(__file__).parents[2]
        done = subprocess.run(argv, cwd=root, env=env, capture_output=True, text=True, check=False, timeout=180)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


@pytest.fixture
def verify_switch(server: FakeServer, run_example: Callable[[str], str]) -> Callable[..., None]:
    """Checks a pair of examples: they say the same, and only the one with bidikv names a session, in every call."""

    def call(name: str, **arguments: str) -> dict[str, Any]:
        function = {"name": name, "arguments": json.dumps(arguments)}
        return {"tool_calls": [{"id": f"call-{name}", "type": "function", "function": function}]}

    def run(module: str, *, answer_tool: str | None) -> tuple[str, list[str | None]]:
        del server.requests[:]
        for i in range(3):
            server.reply(**call("look", city="Paris"))
            server.reply(
                **({"text": f"Paris {i}."} if answer_tool is None else call(answer_tool, answer=f"Paris {i}."))
            )
        said = run_example(module)
        return said, [request.session_id for request in server.requests if request.verb == "chat"]

    def verify(framework: str, *, answer_tool: str | None = None) -> None:
        plain, ours = (
            run(f"examples.frameworks.{framework}.{name}", answer_tool=answer_tool) for name in ("before", "after")
        )
        assert plain == ("Paris 0.\nParis 1.\nParis 2.\n", [None] * 6)
        assert ours == (plain[0], ["trips"] * 6)
        assert server.info("trips").lease.state == "active"

    return verify
