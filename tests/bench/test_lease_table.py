"""The bench of the lease table measures what it says."""

import json
import sys
from typing import ClassVar

import pytest

from bench import lease_table


@pytest.fixture
def small(monkeypatch, tmp_path):
    """Makes the bench small, and its pool of blocks cheap to import."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["lease_table.py"])
    monkeypatch.setattr(lease_table, "NUM_LEASES", 5)
    monkeypatch.setattr(lease_table, "NUM_REPEATS", 2)
    monkeypatch.setattr(lease_table, "NUM_RUNS", 2)
    monkeypatch.setattr(lease_table, "measure_block_pool", lambda: {"pin and release": 10.0})
    return tmp_path


def test_every_bar_is_measured(small):
    """Each bar has a row in the tables that it is about, and the file says so."""
    lease_table.main()
    result = json.loads((small / "out/lease_table.json").read_text())
    rows = result["p50_us"]
    assert set(rows) == {"block size 16", "block size 32", "a turn's way", "vLLM's pool, 1000 blocks"}
    measured = {name for row in rows.values() for name in row}
    assert set(result["bars_us"]) <= measured
    elsewhere = {"choose", "learn", "pin and release"}
    assert set(result["bars_us"]) - elsewhere <= set(rows["block size 32"])


def test_a_missed_bar_is_an_exit_status(small, monkeypatch, capsys):
    """A row above its bar is marked, named at the end, and makes the command fail."""
    bars = dict.fromkeys(lease_table.BARS_US, 1e9) | {"pin and release": 9.0}
    monkeypatch.setattr(lease_table, "BARS_US", bars)
    assert lease_table.main() == 1
    assert "missed: vLLM's pool, 1000 blocks: pin and release" in capsys.readouterr().out
    monkeypatch.setattr(lease_table, "BARS_US", dict.fromkeys(bars, 1e9))
    assert lease_table.main() == 0


class FakeWatch:
    """Notes what it is told of steps."""

    noted: ClassVar = []

    def __init__(self, rates):
        """See `StepWatch`."""

    def scheduled(self, num_tokens, *, now_s):
        """See `StepWatch`."""
        self.noted.append((len(num_tokens), now_s))


def test_a_step_is_all_that_the_connector_does_in_one(small, monkeypatch):
    """It times the step's requests, and ends what is due."""
    monkeypatch.setattr(lease_table, "StepWatch", FakeWatch)
    home = lease_table.make_home(16)
    step = lease_table.make_step(home)
    home.handle("open", {"tenant": "t", "session_id": "s"}, now_s=0.0)
    step(1e6)
    assert FakeWatch.noted == [(lease_table.NUM_RUNNING, 1e6)]
    assert home.sweep(now_s=1e6) == 0  # the session was due, and the step has ended it


def test_the_page_has_every_row_and_says_what_was_missed(small, monkeypatch):
    """It is written where it is asked for, and only there."""
    (small / "docs").mkdir()
    lease_table.main()
    assert not (small / "docs/lease-table.md").exists()
    monkeypatch.setattr(lease_table, "BARS_US", dict.fromkeys(lease_table.BARS_US, 1e9) | {"pin and release": 9.0})
    monkeypatch.setattr(sys, "argv", ["lease_table.py", "--doc"])
    lease_table.main()
    text = (small / "docs/lease-table.md").read_text()
    rows = json.loads((small / "out/lease_table.json").read_text())["p50_us"]
    assert text.count("\n| ") == sum(len(row) + 1 for row in rows.values())
    assert "| pin and release | 10.0 | 9 | **missed** |" in text
    assert "| begin | " in text
    assert text.count("missed") == 1


def test_a_row_is_that_of_its_quietest_run(small, monkeypatch):
    """Runs disturb rows one by one, so each row is chosen by itself."""
    found = iter([{"pin": 3.0, "unpin": 1.0}, {"pin": 2.0, "unpin": 4.0}])
    monkeypatch.setattr(lease_table, "measure_block_pool", lambda: next(found))
    assert lease_table.measure()["vLLM's pool, 1000 blocks"] == {"pin": 2.0, "unpin": 1.0}
