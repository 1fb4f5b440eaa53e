"""`bidikv top` against the SDK's own test double, over real sockets."""

import io
import json

import pytest
from rich.console import Console

from server_ext.cli import top as top_module
from server_ext.cli._server import connected

from .deployment import Deployment, serving


@pytest.fixture
def talked(deployment):
    """A deployment in which session `a` has had two turns."""
    with deployment.server.client() as client:
        session = client.session("a")
        session.send("one two three")
        session.send("four")
    return deployment


def test_once_shows_the_engine_and_the_sessions(talked, invoke):
    """Pool, sessions, turns and tokens of the whole engine above, the key's sessions below."""
    result = invoke("top", "--once", "--base-url", talked.url)
    assert result.exit_code == 0
    assert "pool      1024 blocks: 900 free, 120 leased, 4 being read, 2 unsettled" in result.stdout
    assert "sessions  6, 1 with a running turn; 1 of this key" in result.stdout
    assert "turns     40; of their prompt tokens 80% fetched, 5% reused, 15% computed; 3 leases" in result.stdout
    assert "fetched: cheapest" in result.stdout


def test_once_as_json(talked, invoke):
    """One object with both parts."""
    told = json.loads(invoke("top", "--once", "--json", "--base-url", talked.url).stdout)
    assert told["totals"]["leased_blocks"] == 120
    assert [info["session"] for info in told["sessions"]] == ["a"]


@pytest.mark.parametrize("metrics", [None, "vllm:num_requests_running 1.0\n"])
def test_without_metrics_the_pool_comes_from_the_sessions(talked, invoke, metrics):
    """A proxy that passes `/v1` only costs the totals, not the table."""
    talked.metrics = metrics
    result = invoke("top", "--once", "--base-url", talked.url)
    assert result.exit_code == 0
    assert "1024 blocks" in result.stdout
    assert "no /metrics here" in result.stdout
    assert json.loads(invoke("top", "--once", "--json", "--base-url", talked.url).stdout)["totals"] is None


def test_an_empty_engine(deployment, invoke):
    """No sessions is a state to show, not an error."""
    assert "no sessions of this key" in invoke("top", "--once", "--base-url", deployment.url).stdout
    deployment.metrics = None
    assert "unknown" in invoke("top", "--once", "--base-url", deployment.url).stdout


def test_a_first_look_that_fails_ends_it(invoke):
    """Status 1 and the reason, as for every command."""
    with serving(Deployment()) as gone:
        url = gone.url
    result = invoke("top", "--once", "--base-url", url)
    assert result.exit_code == 1
    assert "bidikv up" in result.stderr


def test_watching_outlives_a_server_that_goes_away(talked):
    """The table follows the sessions; while the server fails it says why, and then goes on."""
    console = Console(file=io.StringIO(), force_terminal=True, width=160)
    looks = []

    def wait():
        looks.append(console.file.getvalue())
        if len(looks) == 1:
            talked.raw = lambda method, path: (500, {"error": {"message": "broken", "code": "internal_error"}})
        elif len(looks) == 2:
            talked.raw = lambda method, path: None
        else:
            raise KeyboardInterrupt

    url = f"{talked.url}/v1"
    with connected(url, None) as client:
        first = top_module.collect(client, talked.url)
        with pytest.raises(KeyboardInterrupt):
            top_module.watch(client, url, first, console, wait)
    assert ["not now" in shown for shown in looks] == [False, True, True]
    assert "fetched: cheapest" in looks[0]
    assert "fetched: cheapest" not in looks[1].removeprefix(looks[0])
    assert "fetched: cheapest" in looks[2].removeprefix(looks[1])


def test_json_of_every_look(talked, invoke, monkeypatch):
    """Without --once there is one line per look, until Ctrl-C, which is no error."""
    seen = []

    def sleep(interval_s):
        seen.append(interval_s)
        if len(seen) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(top_module.time, "sleep", sleep)
    result = invoke("top", "--json", "--interval", "7", "--base-url", talked.url)
    assert result.exit_code == 0
    assert len([json.loads(line) for line in result.stdout.splitlines()]) == 3
    assert seen == [7.0] * 3
