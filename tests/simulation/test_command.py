"""`bidikv simulate` as its user sees it."""

import json
import sys

import pytest
from typer.testing import CliRunner

from server_ext.cli._app import app

from .fleets import RATES

SMALL_RUN = ["simulate", "--sessions", "6", "--concurrent", "3", "--chunk", "2048", "--quiet"]


def bidikv(*arguments):
    """Run the command."""
    return CliRunner().invoke(app, list(arguments), env={"COLUMNS": "160"})


def write_trace(folder, *blocks):
    """Write a trace of one session whose prompts have so many blocks of 64 tokens."""
    requests = [
        {"t": 10 * i, "in": 64 * n, "out": 20, "hash_ids": [*range(n)], "api_time": 1.0, "stop": "tool_use"}
        for i, n in enumerate(blocks)
    ]
    trace = {"id": "a", "block_size": 64, "hash_id_scope": "local", "requests": requests}
    (folder / "a.json").write_text(json.dumps(trace))


def test_one_fleet_is_told_in_full():
    """Percentiles of first and later turns, outcomes, reasons, leases and how busy everything was."""
    said = bidikv(*SMALL_RUN)
    assert said.exit_code == 0, said.output
    for part in ("llama-3.1-8b", "first turns", "later turns", "p99", "fetched", "because:", "leases:", "busy:"):
        assert part in said.stdout


def test_a_grid_is_a_table_and_an_advice():
    """Each combination is a row, and the settings to begin with stand at the end."""
    said = bidikv(*SMALL_RUN, "--sweep", "decode=1,2", "--sweep", "ttl=5,60", "--target-p99", "1000")
    assert said.exit_code == 0, said.output
    assert '"default_ttl_s": 5.0' in said.stdout
    assert "decode 1, ttl 5: p99" in said.stdout


def test_json_alone_on_standard_output():
    """The object has the rates, the scenario, one cell per combination and the advice."""
    said = bidikv(*SMALL_RUN, "--sweep", "route=fetch,prefill", "--json", "-")
    data = json.loads(said.stdout)
    assert [cell["values"] for cell in data["cells"]] == [{"route": "fetch"}, {"route": "prefill"}]
    assert data["cells"][0]["results"]["outcomes"]["fetched"] > 0
    assert "fetched" not in data["cells"][1]["results"]["outcomes"]
    assert data["scenario"]["sessions"] == 6
    assert data["advice"]["settings"]["budget_fraction"] == 0.5


def test_the_same_seed_says_the_same():
    """Twice the same command is twice the same output; another seed is another one."""
    one, again = (bidikv(*SMALL_RUN, "--seed", "3", "--json", "-").stdout for _ in range(2))
    assert one == again
    assert bidikv(*SMALL_RUN, "--seed", "4", "--json", "-").stdout != one


def test_measured_rates_take_the_place_of_hardware(tmp_path):
    """The pool and the name are those of the file, and the sessions fit its context."""
    path = tmp_path / "rates.json"
    path.write_text(json.dumps({**RATES.to_json(), "max_context_tokens": 8_192}))
    data = json.loads(bidikv(*SMALL_RUN, "--rates", str(path), "--json", "-").stdout)
    assert data["rates"]["model"] == "round"
    assert data["cells"][0]["results"]["refused"] == {}


def test_recorded_sessions_are_played(tmp_path):
    """Traces are drawn from, or played as they were."""
    write_trace(tmp_path, 10, 14, 18)
    arguments = [*SMALL_RUN, "--traces", str(tmp_path), "--json", "-"]
    assert json.loads(bidikv(*arguments).stdout)["cells"][0]["results"]["num_turns"] == 18
    assert json.loads(bidikv(*arguments, "--as-logged").stdout)["cells"][0]["results"]["num_turns"] == 3


def test_what_is_odd_in_traces_is_told_and_counted(tmp_path):
    """As by `analyze`: a line that cannot be read is named on standard error, and in the JSON."""
    write_trace(tmp_path, 10, 14)
    (tmp_path / "b.jsonl").write_text('{"messages": 5}\n{"messages": 6}\nhello\n')
    said = bidikv(*SMALL_RUN, "--traces", str(tmp_path), "--json", "-")
    problems = json.loads(said.stdout)["input"]["problems"]
    assert {one["name"]: one["count"] for one in problems} == {"malformed_line": 2, "unknown_format": 1}
    for text in ("2 x malformed_line: not JSON", "1 x unknown_format", "b.jsonl:1", "b.jsonl:3"):
        assert text in said.stderr
    assert json.loads(bidikv(*SMALL_RUN, "--json", "-").stdout)["input"] == {"problems": []}


@pytest.mark.parametrize("blocks", [(3_000, 3_010), (10,)])
def test_what_no_fleet_can_be_judged_by_is_null(tmp_path, blocks):
    """Prompts over the context, or sessions of one turn: no load is called carried, and no number is infinite."""
    write_trace(tmp_path, *blocks)
    arguments = [*SMALL_RUN, "--traces", str(tmp_path), "--sweep", "concurrent=2,4"]
    data = json.loads(bidikv(*arguments, "--json", "-").stdout, parse_constant=pytest.fail)
    assert data["advice"]["target_p99_s"] is None
    assert "Nothing is recommended" in (text := bidikv(*arguments).stdout)
    assert "and more" not in text


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--model", "gpt-9"], "--model 'gpt-9' is unknown"),
        (["--gpu", "abacus"], "--gpu 'abacus' is unknown"),
        (["--link", "string"], "--link 'string' is unknown"),
        (["--budget", "2"], "budget_fraction"),
        (["--ttl", "0"], "default_ttl_s"),
        (["--concurrent", "-1"], "above 0"),
        (["--turns", "0"], "--turns 0.0: give"),
        (["--turns", "inf"], "--turns inf: give"),
        (["--turns", "nan"], "--turns nan: give"),
        (["--concurrent", "inf"], "inf at a time: give 1 or more, and a number above 0, below 1e+09"),
        (["--concurrent", "nan"], "nan at a time"),
        (["--fixed-ms", "inf"], "--fixed-ms inf: give a number from 0.001 to 1,000,000"),
        (["--fixed-ms", "nan"], "--fixed-ms nan: give"),
        (["--efficiency", "nan"], "--efficiency nan: give a number from 0.001 to 1"),
        (["--target-p99", "nan"], "--target-p99 nan: give"),
        (["--target-p99", "inf"], "--target-p99 inf: give"),
        (["--target-p99", "-1"], "--target-p99 -1.0: give"),
        (["--budget", "nan"], "'budget_fraction' is nan"),
        (["--ttl", "inf"], "'default_ttl_s' is inf"),
        (["--sweep", "ttl=5,nan"], "'default_ttl_s' is nan"),
        (["--sweep", "colour=red"], "--sweep 'colour=red'"),
        (["--sweep", "link=string"], "--link 'string' is unknown"),
        (["--rates", "nowhere.json"], "bidikv rates"),
        (["--traces", "nowhere"], "nowhere does not exist"),
        (["--json", "nowhere/out.json"], "cannot be written"),
    ],
)
def test_a_bad_option_is_named_with_its_fix(arguments, named):
    """One line on standard error, status 1, no traceback."""
    said = bidikv(*SMALL_RUN, *arguments)
    assert said.exit_code == 1
    assert named in said.stderr
    assert "Traceback" not in said.stderr


def test_traces_without_a_session_are_an_error(tmp_path):
    """The error says who can tell what was read."""
    (tmp_path / "a.json").write_text("{}")
    said = bidikv(*SMALL_RUN, "--traces", str(tmp_path))
    assert said.exit_code == 1
    assert "bidikv analyze" in said.stderr
    assert "1 x unknown_format" in said.stderr


def test_a_package_that_lacks_is_named_before_anything_runs(monkeypatch):
    """With how to install it; the clock's is asked for last, and is told as early."""
    for name in ("clock", "fleet", "run"):
        monkeypatch.delitem(sys.modules, f"server_ext.simulation.{name}", raising=False)
    monkeypatch.setitem(sys.modules, "simpy", None)
    said = bidikv(*SMALL_RUN)
    assert said.exit_code == 1
    assert "simulate needs simpy: pip install 'bidikv-sdk[analyze]'" in said.stderr
