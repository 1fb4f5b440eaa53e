"""Nothing that a client can make up reaches a lease, a block, or another machine.

Every public route refuses `kv_transfer_params` by name; and behind that, an engine believes only what is signed.
"""

import json
import secrets
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from server_ext.core.tickets import sign
from server_ext.launch.tiny import TINY

from .common import PREFILL_PATH
from .gate import Gate, ticket_of
from .rig import Rig
from .talk import Talk, words

ROUTES = ["/v1/chat/completions", "/v1/completions", "/v1/responses"]
# The same name to a JSON parser.
HIDDEN = ('"kv_transfer_params"', '"kv_transfer_p\\u0061rams"')


@pytest.fixture
def talk(rig: Rig) -> Talk:
    """A session that holds a lease."""
    talk = rig.talk()
    talk.right_turn(words(200))
    return talk


@pytest.fixture
def trap() -> Iterator[socket.socket]:
    """A port to which nobody may connect."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        yield server
        with pytest.raises(BlockingIOError):
            server.accept()


def body_for(route: str, talk: Talk, **extra: Any) -> dict[str, Any]:
    """Return a request of a stock route that asks for the talk's own prompt again."""
    text = {"role": "user", "content": words(200)}
    asked = {
        "/v1/chat/completions": {"messages": [text], "max_tokens": 4},
        "/v1/completions": {"prompt": talk.last.prompt_ids + talk.last.ids, "max_tokens": 4},
        "/v1/responses": {"input": [text], "max_output_tokens": 4, "store": False},
    }[route]
    # A salt of its own, so that a cached token can only come out of somebody's lease.
    return {"model": TINY, "temperature": 0, "cache_salt": secrets.token_hex(8), **asked, **extra}


def external_hits(rig: Rig) -> float:
    """Return how many tokens the two engines have taken from elsewhere."""
    for role in ("prefill", "decode"):
        rig.step(role)
    return sum(rig.metric(role, "vllm:external_prefix_cache_hits_total") for role in ("prefill", "decode"))


def verify_untouched(talk: Talk, before: dict[str, Any]) -> None:
    """Check that a session and its lease are as before, and that its next turn is fetched."""
    after = talk.info()
    remaining = [info["lease"].pop("remaining_s") for info in (before, after)]
    assert after == before
    assert remaining[1] < remaining[0]
    talk.fetched_turn("Mine.")


@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize("route", ROUTES)
def test_a_session_id_on_a_stock_route(rig: Rig, talk: Talk, role: str, route: str) -> None:
    """A stock request that names a session, in every way that vLLM knows, changes nothing of that session."""
    client, before = rig.prefill if role == "prefill" else rig.decode, talk.info()
    ids = {"session_id": talk.id, "vllm_xargs": {"session_id": talk.id}}
    reply = client.post(route, json=body_for(route, talk, **ids), headers={"X-Session-ID": talk.id})
    assert reply.status_code == 200, reply.text
    verify_untouched(talk, before)


@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize("route", [*ROUTES, "/v1/sessions", "/v1/sessions/{id}/extend", "/v1/sessions/{id}/turns"])
def test_transfer_parameters_on_a_public_route(
    rig: Rig, talk: Talk, trap: socket.socket, role: str, route: str
) -> None:
    """`kv_transfer_params` of any kind are refused by name on every route, and nothing is read or connected to."""
    client = rig.prefill if role == "prefill" else rig.decode
    before, hits = talk.info(), external_hits(rig)
    bodies = []
    for params in made_up(trap):
        for extra in ({"kv_transfer_params": params}, {"vllm_xargs": {"kv_transfer_params": json.dumps(params)}}):
            body = body_for(route, talk, **extra) if route in ROUTES else talk.request("Mine!") | extra
            bodies += [json.dumps(body), json.dumps(body).replace(*HIDDEN)]
    for content in bodies:
        reply = client.post(route.format(id=talk.id), content=content, headers={"Content-Type": "application/json"})
        assert reply.status_code == 400, reply.text
        error = reply.json()["error"]
        assert (error["code"], error["param"]) == ("unsupported_parameter", "kv_transfer_params")
    assert external_hits(rig) == hits
    verify_untouched(talk, before)


def made_up(trap: socket.socket) -> list[dict[str, Any]]:
    """Return parameters that lead to the trap: unsigned, wrongly signed, and of a stock router's kind."""
    named = {
        "remote_engine_id": secrets.token_hex(8),
        "remote_request_id": f"bidikv-ticket-{secrets.token_hex(8)}",
        "remote_host": "127.0.0.1",
        "remote_port": trap.getsockname()[1],
        "remote_block_ids": [list(range(1, 14))],
        "remote_num_tokens": 400,
        "tp_size": 1,
    }
    ways = ({"do_remote_prefill": True}, {"do_remote_decode": True, "do_remote_prefill": False})
    unsigned = [named | way for way in ways]
    forged = [sign(params, b"another secret of sixteen bytes") for params in unsigned]
    return [*unsigned, *forged, *({**params, "bidikv_mac": "00"} for params in unsigned)]


def test_an_engine_believes_only_what_is_signed(rig: Rig, talk: Talk, trap: socket.socket) -> None:
    """Made-up, changed and used tickets that reach P's engine read nothing and make it connect nowhere."""
    with Gate(rig, lambda gate, call: gate.pass_on(call)) as gate:
        talk.fetched_turn("Go on.")
    before, hits = talk.info(), external_hits(rig)
    used = ticket_of(gate.calls[0])
    changed = [{**used, "remote_request_id": "bidikv-ticket-another"}, {**used, "remote_num_tokens": 32}]
    for params in [*made_up(trap), *changed, used]:
        salt = secrets.token_hex(8)
        reply = gate.pass_on({**gate.calls[0], "kv_transfer_params": params, "cache_salt": salt})
        assert reply.status_code == 200
        answer = reply.json()["kv_transfer_params"]
        report = answer.pop("bidikv")
        # What is not signed is no prefill call at all: nothing is kept. The used ticket is one, without its blocks.
        assert bool(answer) == (params is used)
        assert (report["refusal"], report["reason"]) == ("already_used" if params is used else "forged", "read_failed")
        if params is used:
            assert (report["local_tokens"], report["fetched_tokens"]) == (0, 0)
    assert external_hits(rig) == hits
    verify_untouched(talk, before)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"token_ids": [1, 2, 3]}'])
def test_the_prefill_route_is_not_there_for_strangers(rig: Rig, talk: Talk, content: bytes) -> None:
    """Without the token P's prefill route is a 404 whatever is sent; with it, D's is one as well."""
    with Gate(rig, lambda gate, call: gate.pass_on(call)) as gate:
        talk.fetched_turn("Go on.")
    for authorization in ({}, {"Authorization": "Bearer guess"}, {"Authorization": "Basic guess"}):
        reply = rig.prefill.post(PREFILL_PATH, content=content, headers=authorization)
        assert (reply.status_code, reply.json()["error"]["code"]) == (404, "not_found")
    assert rig.decode.post(PREFILL_PATH, content=content, headers=gate.headers).status_code == 404
