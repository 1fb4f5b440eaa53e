"""The examples of docs/testing.md and docs/clients.md run as they stand there."""

import pathlib
import re

import pytest

import bidikv_sdk
from bidikv_sdk.testing import FakeServer

DOCS = pathlib.Path(__file__).parents[2] / "docs"
TESTING, CLIENTS = ((DOCS / name).read_text() for name in ("testing.md", "clients.md"))


def examples_of(text):
    """Return the Python examples of a document."""
    return re.findall(r"```python\n(.*?)```", text, re.DOTALL)


@pytest.mark.parametrize("example", examples_of(TESTING))
def test_an_example_of_testing_runs(example):
    """Its own assertions hold."""
    assert "assert" in example
    exec(compile(example, "docs/testing.md", "exec"), {})


def test_the_table_of_scripts_is_of_calls_that_exist():
    """Each has a method of that name."""
    names = re.findall(r"^\| `(\w+)\(", TESTING, re.MULTILINE)
    assert len(names) == 8
    assert all(callable(getattr(FakeServer, name)) for name in names)


def test_the_example_of_stock_clients_runs(server, capsys):
    """The history is fetched, and the lease was held."""
    (example,) = examples_of(CLIENTS)
    with server.serve() as base_url:
        exec(compile(example.replace("http://127.0.0.1:8200/v1", base_url), "docs/clients.md", "exec"), {})
    assert capsys.readouterr().out == "fetched 8 of 15\n"
    assert {request.verb for request in server.requests} == {"chat", "extend"}


def test_the_table_of_a_session_is_of_members_that_exist():
    """Each is a public member of the current session."""
    _, _, table = CLIENTS.partition("| `session.` |")
    cells = "".join(line.split("|")[1] for line in table.partition("\n\n")[0].splitlines()[1:])
    names = re.findall(r"`(\w+)(?:\(\))?`", cells)
    assert len(names) == 10
    assert all(hasattr(bidikv_sdk.current_session("s"), name) for name in names)
