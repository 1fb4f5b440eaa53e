"""`bidikv session` against the SDK's own test double, over real sockets."""

import json
import re

import pytest

from server_ext.launch.stack import default_state_dir
from server_ext.launch.state import EngineRecord, StackState, write_state

from .deployment import Deployment, serving


@pytest.fixture
def talked(deployment):
    """A deployment in which session `a` has had two turns, and `b` one whose lease was revoked."""
    with deployment.server.client() as client:
        for session_id, texts in (("a", ("one two three", "four")), ("b", ("five",))):
            session = client.session(session_id)
            for text in texts:
                session.send(text)
    deployment.server.revoke("b")
    return deployment


def test_ls_shows_what_is_held_and_how_the_last_turn_went(talked, invoke):
    """One line per session, those that hold most first."""
    result = invoke("session", "ls", "--base-url", talked.url)
    assert result.exit_code == 0
    head, first, second = [line for line in result.stdout.splitlines() if line.strip()]
    assert head.split() == ["session", "turns", "lease", "left", "tokens", "blocks", "last", "turn", "reuse"]
    assert re.match(r"a\s+2 +active +60\.0 s +\d+ +1 +fetched: cheapest +\d+%", first)
    assert re.match(r"b\s+1 +revoked +- +0 +0 +recomputed: first_turn +0%", second)


def test_ls_as_json_is_the_wires_objects(talked, invoke):
    """Programs get what the protocol says, unknown to no reader of docs/http.md."""
    sessions = json.loads(invoke("session", "ls", "--json", "--base-url", talked.url).stdout)["sessions"]
    assert [info["session"] for info in sessions] == ["a", "b"]
    assert sessions[0]["last_turn"]["outcome"] == "fetched"


def test_ls_without_sessions(deployment, invoke):
    """An empty list says so, and is no error."""
    result = invoke("session", "ls", "--base-url", deployment.url)
    assert (result.exit_code, result.stdout) == (0, "no sessions\n")
    assert json.loads(invoke("session", "ls", "--json", "--base-url", deployment.url).stdout) == {"sessions": []}


@pytest.mark.parametrize("verb", ["show", "extend", "release", "end"])
def test_an_id_that_begins_with_a_dash(deployment, invoke, verb):
    """The SDK makes such ids; they are no options."""
    with deployment.server.client() as client:
        client.session("-a1").send("hi")
    result = invoke("session", verb, "-a1", "--json", "--base-url", deployment.url)
    assert result.exit_code == 0
    assert json.loads(result.stdout)["session"] == "-a1"


def test_an_id_that_looks_like_markup_is_printed_as_it_is(deployment, invoke):
    """An id is data: it must not colour the table."""
    with deployment.server.client() as client:
        client.session("[red]x").send("hi")
    assert "[red]x" in invoke("session", "ls", "--base-url", deployment.url).stdout


def test_show(talked, invoke):
    """One session: lease, blocks, last turn, pool; the same as JSON."""
    shown = invoke("session", "show", "a", "--base-url", talked.url)
    assert shown.exit_code == 0
    assert re.search(r"lease +active\n", shown.stdout)
    assert re.search(r"last turn +fetched: cheapest", shown.stdout)
    assert re.search(
        r"lease +revoked \(lease_revoked\)", invoke("session", "show", "b", "--base-url", talked.url).stdout
    )
    info = json.loads(invoke("session", "show", "a", "--json", "--base-url", talked.url).stdout)
    assert (info["session"], info["turn"]) == ("a", 2)


def test_extend(talked, invoke):
    """The lease lives longer, by the server's default or by what was asked for."""
    assert "kept for 60.0 s" in invoke("session", "extend", "a", "--base-url", talked.url).stdout
    result = invoke("session", "extend", "a", "--ttl-s", "300", "--json", "--base-url", talked.url)
    assert json.loads(result.stdout)["lease"]["remaining_s"] == 300.0
    assert talked.server.info("a").lease.remaining_s == 300.0


def test_release_and_end_take_several_ids(talked, invoke):
    """Release keeps the sessions, end forgets them."""
    result = invoke("session", "release", "a", "b", "--base-url", talked.url)
    assert result.exit_code == 0
    assert "a: lease released" in result.stdout
    assert talked.server.info("a").turn == 2
    result = invoke("session", "end", "a", "b", "--json", "--base-url", talked.url)
    assert [json.loads(line) for line in result.stdout.splitlines()] == [
        {"session": "a", "ended": True},
        {"session": "b", "ended": True},
    ]
    with pytest.raises(KeyError):
        talked.server.info("a")


@pytest.mark.parametrize("verb", ["show", "extend", "release", "end"])
def test_an_unknown_id(deployment, invoke, verb):
    """Status 1, and where to find the right one."""
    result = invoke("session", verb, "nobody", "--base-url", deployment.url)
    assert result.exit_code == 1
    assert "nobody" in result.stderr
    assert "bidikv session ls" in result.stderr


def test_extending_a_lease_that_is_gone(talked, invoke):
    """Status 1, and what becomes of the session."""
    result = invoke("session", "extend", "b", "--base-url", talked.url)
    assert result.exit_code == 1
    assert "next turn computes" in result.stderr


def test_a_wrong_key(deployment, invoke):
    """Status 1, and how to give the right one; no key counts as a wrong one."""
    deployment.api_key = "right"
    for key in ((), ("--api-key", "wrong")):
        result = invoke("session", "ls", "--base-url", deployment.url, *key)
        assert result.exit_code == 1
        assert "--api-key or BIDIKV_API_KEY" in result.stderr
    assert invoke("session", "ls", "--base-url", deployment.url, "--api-key", "right").exit_code == 0


def test_a_server_without_the_extension(deployment, invoke):
    """Status 1, and what stock vLLM lacks."""
    deployment.raw = lambda method, path: (404, {"detail": "Not Found"})
    result = invoke("session", "ls", "--base-url", deployment.url)
    assert result.exit_code == 1
    assert "VLLM_PLUGINS=bidikv,bidikv_http" in result.stderr


def test_a_server_that_is_not_there(invoke):
    """Status 1, and how to start one."""
    with serving(Deployment()) as gone:
        url = gone.url
    result = invoke("session", "ls", "--base-url", url)
    assert result.exit_code == 1
    assert f"no server at {url}/v1" in result.stderr
    assert "bidikv up" in result.stderr


def test_no_server_at_all(invoke):
    """Without an address and without a local stack it is a matter of usage: status 2."""
    result = invoke("session", "ls")
    assert result.exit_code == 2
    assert "BIDIKV_BASE_URL" in result.stderr


@pytest.mark.parametrize("url", ["127.0.0.1:8200", "http://[", "ftp://x"])
def test_an_address_that_is_none(invoke, url):
    """Status 2, with an example."""
    result = invoke("session", "ls", "--base-url", url)
    assert result.exit_code == 2
    assert "http://127.0.0.1:8200/v1" in result.stderr


def test_an_id_that_no_header_can_carry(deployment, invoke):
    """Status 2 before anything is sent."""
    assert invoke("session", "show", "a\nb", "--base-url", deployment.url).exit_code == 2


def test_the_address_comes_from_the_environment_or_the_local_stack(talked, invoke, monkeypatch):
    """The option wins, then the environment, then what `bidikv up` has started."""
    records = [EngineRecord(role, 1, 0.0, talked.url, "log") for role in ("prefill", "decode")]
    default_state_dir().mkdir(parents=True)
    write_state(default_state_dir(), StackState("m", "small", tuple(records), ready=True))
    assert invoke("session", "show", "a").exit_code == 0
    monkeypatch.setenv("BIDIKV_BASE_URL", "http://127.0.0.1:1/v1")
    assert invoke("session", "show", "a").exit_code == 1
    assert invoke("session", "show", "a", "--base-url", f"{talked.url}/v1/").exit_code == 0
