"""The bench of the lease table measures what it says."""

import json
import re
import sys
import warnings
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest

from bench import lease_table
from server_ext.core.home import Home
from server_ext.core.steps import StepWatch

with warnings.catch_warnings():
    # Warnings are errors, but what torch and vLLM say while they are imported is not ours to mend.
    warnings.simplefilter("ignore")
    from bench._lease_step import make_step
    from server_ext.engine import compat, decode
    from server_ext.engine.decode import DecodeScheduler

ROOT = Path(__file__).resolve().parents[2]


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
    of_sizes = {f"{table}block size {size}" for table in ("", "a turn's ops and a step, ") for size in (16, 32)}
    assert set(rows) == of_sizes | {"a turn's way", "vLLM's pool, 1000 blocks"}
    measured = {name for row in rows.values() for name in row}
    assert set(result["bars_us"]) <= measured
    elsewhere = {"choose", "learn", "pin and release"}
    of_size = {*rows["block size 32"], *rows["a turn's ops and a step, block size 32"]}
    assert set(result["bars_us"]) - elsewhere <= of_size
    assert {"begin op", "settle op"} <= of_size - set(result["bars_us"])


def test_a_missed_bar_is_an_exit_status(small, monkeypatch, capsys):
    """A row above its bar is marked, named at the end, and makes the command fail."""
    bars = dict.fromkeys(lease_table.BARS_US, 1e9) | {"pin and release": 9.0}
    monkeypatch.setattr(lease_table, "BARS_US", bars)
    assert lease_table.main() == 1
    assert "missed: vLLM's pool, 1000 blocks: pin and release" in capsys.readouterr().out
    monkeypatch.setattr(lease_table, "BARS_US", dict.fromkeys(bars, 1e9))
    assert lease_table.main() == 0


def test_every_second_turn_has_a_ticket(small, monkeypatch):
    """What `begin op` costs is hashing and signing above all."""
    tickets = []

    def note(home, **fields):
        begun = begin(home, **fields)
        tickets.append(begun["ticket"])
        return begun

    begin = Home.begin
    monkeypatch.setattr(Home, "begin", note)
    lease_table.measure_home(16)
    first, second = tickets[: lease_table.NUM_LEASES], tickets[lease_table.NUM_LEASES :]
    assert first == [None] * lease_table.NUM_LEASES
    assert [ticket["remote_num_tokens"] for ticket in second] == [lease_table.LEASE_TOKENS] * lease_table.NUM_LEASES


def test_a_step_is_all_that_the_connector_does_in_one(monkeypatch):
    """It passes the guard once for each request and calls every hook; the other step does none of it."""
    called = Counter()

    def count(owner, name):
        method = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *args, **named: called.update([name]) or method(*args, **named))

    for hook in ("on_new_request", "build_connector_meta", "update_connector_output", "request_finished"):
        count(DecodeScheduler, hook)
    for part in ("scheduled", "finished"):
        count(StepWatch, part)
    guarded = []
    guard = compat.guard_allocations
    monkeypatch.setattr(
        compat, "guard_allocations", lambda manager, *asks: guarded.append(manager) or guard(manager, *asks)
    )
    home = lease_table.make_home(16)
    home.handle("open", {"tenant": "t", "session_id": "s"}, now_s=0.0)
    monkeypatch.setattr(decode, "time", SimpleNamespace(perf_counter=lambda: 1e6))
    step, without = make_step(home, 8)
    without()
    assert not called
    (manager,) = guarded
    count(manager, "allocate_slots")
    step()
    assert called.pop("allocate_slots") == 8
    assert set(called.values()) == {1}
    assert len(called) == 6
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
    assert "| pin and release | 10.0 | 10.0 | 9 | **missed** |" in text
    assert "| begin | " in text
    assert text.count("missed") == 1


def test_the_documented_page_is_what_the_bench_writes():
    """Its text, rows, limits and verdicts are those of this version, whatever was measured."""
    text = (ROOT / lease_table.DOC).read_text()
    installed = re.search(r"--doc` on (?P<cpu>.+) \(Python (?P<python>\S+), vLLM (?P<vllm>\S+)\)", text).groupdict()
    rows = {}
    for line in text.splitlines():
        if title := re.fullmatch(r"\*\*(.+)\*\*", line):
            rows[title[1]] = {}
        elif row := re.match(r"\| (.+?) \| ([\d.]+) \| ([\d.]+) \|", line):
            rows[list(rows)[-1]][row[1]] = lease_table.Row(float(row[2]), float(row[3]))
    assert text == lease_table.page(rows, installed)
    assert set(lease_table.BARS_US) <= {name for table in rows.values() for name in table}


def test_a_row_is_that_of_its_quietest_run(small, monkeypatch):
    """Runs disturb rows one by one, so each row is chosen by itself; the run in the middle is not hidden."""
    monkeypatch.setattr(lease_table, "NUM_RUNS", 3)
    found = iter([{"pin": 3.0, "unpin": 1.0}, {"pin": 2.0, "unpin": 4.0}, {"pin": 9.0, "unpin": 5.0}])
    monkeypatch.setattr(lease_table, "measure_block_pool", lambda: next(found))
    assert lease_table.measure()["vLLM's pool, 1000 blocks"] == {"pin": (2.0, 3.0), "unpin": (1.0, 4.0)}
