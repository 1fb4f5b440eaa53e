"""What docs/field-reports.md promises is there."""

import ast
import re
from pathlib import Path
from runpy import run_path

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "field-reports.md").read_text("utf-8")
ITEMS = re.split(r"\n(?=\*\*[WLSRT]\d+ - )", TEXT)[1:]


def functions_of(path: str) -> set[str]:
    """Return the names of the functions in one file."""
    tree = ast.parse((ROOT / path).read_text("utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


def test_every_test_that_is_named_exists():
    """A test that is renamed takes its promise along."""
    named = re.findall(r"`(tests/[\w/]+\.py)::(test_\w+)`", TEXT)
    assert len(named) > 50
    assert [f"{path}::{name}" for path, name in named if name not in functions_of(path)] == []


def test_every_test_is_seen_to_fail():
    """What is named has a guard that a mutant takes out, with engines or without; it stands once, with its tests."""
    mutants = run_path(str(ROOT / "tests" / "mutants.py"))["MUTANTS"]
    seen = {tuple(test.split("::")) for mutant in mutants for test in mutant.tests}
    # The tests behind these words promise no more than that.
    guarded = re.sub(r"passes on engines:\s(`[^`]+`,?\s?)+", "", TEXT)
    named = set(re.findall(r"`(tests/[\w/]+\.py)::(test_\w+)`", guarded))
    assert named - seen == set()
    assert {(path, test) for path, test in seen if test not in functions_of(path)} == set()
    assert [m.guard for m in mutants if (ROOT / m.file).read_text("utf-8").count(m.guard) != 1] == []


def test_every_report_has_a_guard():
    """Each item names a test that needs no engine, and so one of `make mutants`; no item stands there twice."""
    names = [item[2 : item.index(" - ")] for item in ITEMS]
    assert len(names) == len(set(names)) == 33
    cheap = re.compile(r"`tests/(?!engine/)[\w/]+\.py::test_")
    assert [name for name, item in zip(names, ITEMS, strict=True) if not cheap.search(item)] == []
