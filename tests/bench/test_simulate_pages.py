"""The tables of docs/simulate.md: where they stand, and what a row is made of."""

import re

import pytest

from bench.simulate_pages import PAGE, SWEEPS, table, with_table

RESULTS = {
    "first_ttft_s": {"p50": 0.834, "p95": 1.0, "p99": 2.0},
    "later_ttft_s": {"p50": 0.051, "p95": 1.04, "p99": 6.0},
    "token_s": {"p50": 0.005, "p95": 0.0094, "p99": 0.02},
    "outcomes": {"local": 0.94, "fetched": 0.06},
    "utilisation": {"prefill": 0.0, "decode": 0.1, "links": 0.0, "links_max": 0.004},
    "pinned_byte_s_per_avoided_token": 3.8e6,
}


def test_every_sweep_has_its_table():
    """Each stands once in the page, and another one takes its place without anything else changing."""
    text = PAGE.read_text("utf-8")
    assert sorted(re.findall(r"<!-- (.*) -->", text)) == sorted(SWEEPS)
    for name in SWEEPS:
        changed = with_table(text, name, ["| a | b |", "| 1 | 2 |"])
        assert f"<!-- {name} -->\n\n| a | b |\n|---|---|\n| 1 | 2 |\n\n" in changed
        assert re.sub(r"\|.*\n", "", changed) == re.sub(r"\|.*\n", "", text)


def test_a_table_that_the_page_does_not_have():
    """It is named."""
    with pytest.raises(ValueError, match="0 tables named 'other'"):
        with_table("text\n", "other", ["| a |"])


def test_a_row_has_the_values_of_its_cell_and_its_figures():
    """In the units that the page names."""
    other = {**RESULTS, "pinned_byte_s_per_avoided_token": None}
    cells = [
        {"values": {"concurrent": 50.0, "route": "auto"}, "results": RESULTS},
        {"values": {"concurrent": 50.0, "route": "prefill"}, "results": other},
    ]
    head, first, second = table(cells)
    assert head.startswith("| sessions | route | first p50 | p50 |")
    assert first == "| 50 | auto | 0.83 | 0.05 | 1.0 | 6.0 | 9 | 94 / 6 / 0 / 0 | 0 / 10 / 0 | 3.8 |"
    assert second.endswith("| - |")
    assert head.count("|") == first.count("|")
