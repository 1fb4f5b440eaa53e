import pytest
from rich.console import Console

from bench._result import Check
from bench._show import HEADER, comparison, row, verdict


def printed(renderable):
    """The text that a console of 120 columns shows."""
    console = Console(width=120)
    with console.capture() as capture:
        console.print(renderable)
    return capture.get()


def test_a_row_stands_under_its_header(make_result):
    """Every number of the report has its column."""
    line = row(make_result().turns[1])
    assert len(line) == len(HEADER)
    assert line.split() == ["2", "2100", "fetched", "forced", "2000", "0", "2000", "100", "2", "1.50", "s"]


def test_the_comparison_names_the_turns_that_differ(make_result):
    """A turn with other tokens is seen at a glance."""
    assert "DIFFERENT" not in printed(comparison(make_result()))
    assert "DIFFERENT" in printed(comparison(make_result(token_ids=(5, 7))))


def test_the_comparison_tells_the_ratio_and_the_limit(make_result):
    """The headline stands below the table."""
    text = " ".join(printed(comparison(make_result())).split())
    assert "2000 tokens or more: 14.0" in text
    assert "17.5" in text


@pytest.mark.parametrize(("passed", "word"), [(True, "PASS"), (False, "FAIL")])
def test_a_verdict_says_what_was_found(passed, word):
    """One line: pass or fail, the expectation, the number."""
    assert verdict(Check("fast", passed, "3 times")).plain == f"{word}  fast: 3 times"
