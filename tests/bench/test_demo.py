import json

from bench import demo
from bidikv_sdk.testing import FakeServer
from examples.agents.coding_agent import SCRIPT


def test_an_arm_is_the_whole_task(capsys):
    """One row for each turn, all of them returned."""
    server = FakeServer()
    with server.client() as client, client.session(route="fetch") as session:
        turns = demo.run_arm(session)
    assert len(turns) == len(SCRIPT["steps"]) + 1
    assert {turn.cache.outcome for turn in turns[1:]} == {"fetched"}
    assert len(capsys.readouterr().out.splitlines()) == len(turns)


def test_the_warm_up_reads_both_ways():
    """Its second turn fetches, so that the first transfer of the pair is behind both arms."""
    server = FakeServer()
    with server.client() as client:
        points = demo.warm_up(client)
    turns = [request.body for request in server.requests if request.verb == "turns"]
    assert [turn["bidikv"]["route"] for turn in turns[:2]] == ["fetch", "fetch"]
    assert {turn["bidikv"]["route"] for turn in turns[2:]} == {"recompute"}
    assert len(points) == len(turns[2:])
    assert server.requests[-1].verb == "end"


def test_the_caches_of_the_prefill_engine_stay_on(tmp_path):
    """Only the salt changes: no argument switches a prefix cache off, in neither engine."""
    config = demo.stack_config("model", tmp_path)
    assert config.fresh_prefill_salt
    assert not config.extra_args
    assert config.secret_file.exists()


def test_the_report_is_written_and_judged(make_result, tmp_path, monkeypatch, capsys):
    """The file is there whatever the verdict; the exit status tells it."""
    monkeypatch.setattr(demo, "OUT", tmp_path / "out")
    assert demo.report(make_result()) == 0
    assert demo.report(make_result(token_ids=(5, 7))) == 1
    assert json.loads((tmp_path / "out" / "demo.json").read_text())["tokens_identical"] is False
    assert "FAIL  both arms generated the same tokens" in capsys.readouterr().out
