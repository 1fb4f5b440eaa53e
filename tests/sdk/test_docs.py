"""The examples of docs/testing.md run as they stand there."""

import pathlib
import re

import pytest

TEXT = (pathlib.Path(__file__).parents[2] / "docs" / "testing.md").read_text()
EXAMPLES = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)


@pytest.mark.parametrize("example", EXAMPLES, ids=range(len(EXAMPLES)))
def test_an_example_runs(example):
    """Its own assertions hold."""
    assert "assert" in example
    exec(compile(example, "docs/testing.md", "exec"), {})


def test_the_table_of_scripts_is_of_calls_that_exist():
    """Each has a method of that name."""
    from bidikv_sdk.testing import FakeServer

    names = re.findall(r"^\| `(\w+)\(", TEXT, re.MULTILINE)
    assert len(names) == 8
    assert all(callable(getattr(FakeServer, name)) for name in names)
