"""Nothing that a client can make up reaches a lease, a block, or another machine.

Every route refuses `kv_transfer_params` by name. Here they are written so that this check does not see them, to show
that the engines do not believe them either.
"""

import json
import secrets
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from server_ext.core.tickets import sign

from .harness import PREFILL_PATH, TINY, Gate, Rig, Talk, ticket_of, words

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
    """A port to which nobody must connect."""
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
    return sum(rig.metric(role, "vllm:external_prefix_cache_hits_total") for role in ("prefill", "decode"))


def post_hidden(rig: Rig, role: str, route: str, body: dict[str, Any]) -> None:
    """Send a body whose transfer parameters the front door does not see; check that nothing was read."""
    client = rig.prefill if role == "prefill" else rig.decode
    before = external_hits(rig)
    content = json.dumps(body).replace(*HIDDEN)
    reply = client.post(route, content=content, headers={"Content-Type": "application/json"})
    assert reply.status_code == 200, reply.text
    usage = reply.json()["usage"]
    details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or {}
    assert not details.get("cached_tokens")
    rig.step(role)
    assert external_hits(rig) == before


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
@pytest.mark.parametrize("route", [*ROUTES, "/v1/sessions", "/v1/sessions/{id}/extend"])
def test_transfer_parameters_are_refused_by_name(rig: Rig, talk: Talk, role: str, route: str) -> None:
    """`kv_transfer_params` in a body, or among vLLM's extra arguments, is a 400 on every public route."""
    client = rig.prefill if role == "prefill" else rig.decode
    for extra in ({"kv_transfer_params": {"a": 1}}, {"vllm_xargs": {"kv_transfer_params": "{}"}}):
        body = body_for(route, talk, **extra) if route in ROUTES else {"session_id": talk.id, **extra}
        reply = client.post(route.format(id=talk.id), json=body)
        assert reply.status_code == 400, reply.text
        error = reply.json()["error"]
        assert (error["code"], error["param"]) == ("unsupported_parameter", "kv_transfer_params")


@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize("route", ROUTES)
def test_made_up_transfer_parameters(rig: Rig, talk: Talk, trap: socket.socket, role: str, route: str) -> None:
    """Unsigned and wrongly signed parameters read no block and make neither engine connect anywhere."""
    before = talk.info()
    made_up = {
        "remote_engine_id": secrets.token_hex(8),
        "remote_request_id": "bidikv-ticket-made-up",
        "remote_host": "127.0.0.1",
        "remote_port": trap.getsockname()[1],
        "remote_block_ids": [list(range(1, 14))],
        "remote_num_tokens": 400,
        "tp_size": 1,
    }
    for way in ({"do_remote_prefill": True}, {"do_remote_decode": True, "do_remote_prefill": False}):
        unsigned = made_up | way
        for params in (unsigned, sign(unsigned, b"another secret of sixteen bytes"), {**unsigned, "bidikv_mac": "00"}):
            post_hidden(rig, role, route, body_for(route, talk, kv_transfer_params=params))
    verify_untouched(talk, before)


@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize("route", ROUTES)
def test_a_real_ticket_in_the_wrong_hands(rig: Rig, talk: Talk, role: str, route: str) -> None:
    """A ticket that was used, or that was changed after it was signed, reads nothing on a stock route."""
    tickets: list[dict[str, Any]] = []

    def watch(gate: Gate, call: dict[str, Any]) -> Any:
        tickets.append(ticket_of(call))
        return gate.pass_on(call)

    with Gate(rig, watch):
        talk.fetched_turn("Go on.")
    before = talk.info()
    (used,) = tickets
    for params in (used, {**used, "remote_request_id": "bidikv-ticket-another"}, {**used, "remote_num_tokens": 32}):
        post_hidden(rig, role, route, body_for(route, talk, kv_transfer_params=params))
    verify_untouched(talk, before)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"token_ids": [1, 2, 3]}'])
def test_the_prefill_route_is_not_there_for_strangers(rig: Rig, talk: Talk, content: bytes) -> None:
    """Without the token P's prefill route is a 404 whatever is sent; with it, D's is one as well."""
    with Gate(rig, lambda gate, call: gate.pass_on(call)) as gate:
        talk.fetched_turn("Go on.")
    for authorization in ({}, {"Authorization": "Bearer guess"}, {"Authorization": "Bearer "}):
        reply = rig.prefill.post(PREFILL_PATH, content=content, headers=authorization)
        assert (reply.status_code, reply.json()["error"]["code"]) == (404, "not_found")
    assert rig.decode.post(PREFILL_PATH, content=content, headers=gate.headers).status_code == 404
