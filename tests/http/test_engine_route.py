"""What an engine tells of itself, to whom, and what D sees of its Ps."""

import asyncio
import json
from types import SimpleNamespace

import httpx
import pytest
from fastapi import FastAPI
from vllm.entrypoints.serve.middleware.authenticate import AuthenticationMiddleware

from server_ext.engine import compat
from server_ext.http import engine_route
from server_ext.http.engine_route import EngineReport
from server_ext.http.prefill_route import PrefillService, prefill_token

from .fakes import SECRET, make_settings

FACTS = {"vllm": "0.32.0", "block_size": 32}
OTHER_SECRET = b"another secret, just as long as it"


def make_app(role, *, secret=SECRET, keys=(), urls=(), transport=None):
    """Build the HTTP side of one engine; D's Ps are reached through `transport`."""
    app = FastAPI()
    app.include_router(engine_route.router)
    settings = make_settings(role=role, secret=secret, prefill_urls=tuple(urls))
    app.state.bidikv_engine = EngineReport(
        settings, FACTS, has_api_keys=bool(keys), prompt_tokens_details=True, transport=transport
    )
    if role == "prefill":
        app.state.bidikv_prefill = PrefillService(None, settings)
    else:
        app.state.bidikv_conductor = object()
    if keys:
        app.add_middleware(AuthenticationMiddleware, tokens=list(keys))
    return app


class Network(httpx.AsyncBaseTransport):
    """Leads to apps by their host's name; an exception in place of an app is raised, text is what it answers."""

    def __init__(self, hosts):
        self.hosts = hosts

    async def handle_async_request(self, request):
        """Carry one request."""
        host = self.hosts[request.url.host]
        if isinstance(host, Exception):
            raise host
        if isinstance(host, str):
            return httpx.Response(200, text=host)
        return await httpx.ASGITransport(host).handle_async_request(request)


def get(app, path, **headers):
    """Return the reply to a GET."""

    async def main():
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://d") as client:
            return await client.get(path, headers=headers)

    return asyncio.run(main())


def seen_by_decode(p):
    """Return what D sees of one P."""
    app = make_app("decode", urls=["http://p"], transport=Network({"p": p}))
    (one,) = get(app, "/v1/bidikv/prefill").json()["prefill"]
    return one


def test_an_engine_tells_what_it_is():
    """Both roles tell their facts; D its settings as well."""
    for role in ("decode", "prefill"):
        told = get(make_app(role), "/v1/bidikv/engine").json()["engine"]
        assert told["role"] == role
        assert (told["protocol"], told["vllm"], told["block_size"]) == (1, "0.32.0", 32)
        assert ("settings" in told) == (role == "decode")


def test_no_secret_and_no_host_is_told():
    """Neither the secret, nor anything derived from it, nor where the Ps are."""
    app = make_app("decode", urls=["http://hidden-host:8100"], transport=Network({"hidden-host": make_app("prefill")}))
    told = get(app, "/v1/bidikv/engine").text + get(app, "/v1/bidikv/prefill").text
    assert json.loads(get(app, "/v1/bidikv/engine").text)["engine"]["num_prefill_urls"] == 1
    for hidden in ("hidden-host", SECRET.decode(), SECRET.hex(), prefill_token(SECRET)[:8]):
        assert hidden not in told


def test_the_facts_are_behind_the_api_keys():
    """Whoever may not use D may not look at it either."""
    app = make_app("decode", keys=["right"])
    for path in ("/v1/bidikv/engine", "/v1/bidikv/prefill"):
        assert get(app, path).status_code == 401
        assert get(app, path, Authorization="Bearer wrong").status_code == 401
        assert get(app, path, Authorization="Bearer right").is_success


def test_only_holders_of_the_secret_ask_p_for_its_facts():
    """For all others the route is not there."""
    app = make_app("prefill")
    assert get(app, "/bidikv/engine", Authorization=f"Bearer {prefill_token(SECRET)}").is_success
    for headers in ({}, {"Authorization": f"Bearer {prefill_token(OTHER_SECRET)}"}):
        assert get(app, "/bidikv/engine", **headers).status_code == 404
    assert get(make_app("decode"), "/bidikv/engine").status_code == 404


def test_an_engine_without_a_connector_says_so():
    """The plugin alone makes no home, and the reply names what is missing."""
    app = FastAPI()
    app.include_router(engine_route.router)
    reply = get(app, "/v1/bidikv/engine")
    assert (reply.status_code, reply.json()["error"]["code"]) == (404, "session_not_found")
    assert "BidiKVConnector" in reply.json()["error"]["message"]
    assert get(app, "/v1/bidikv/prefill").status_code == 404


def test_d_sees_a_p_that_fits():
    """It gets P's facts, and how far apart their clocks are."""
    one = seen_by_decode(make_app("prefill"))
    assert (one["state"], one["engine"]["role"]) == ("ready", "prefill")
    assert abs(one["clock_offset_s"]) < 1.0


@pytest.mark.parametrize(
    ("p", "state"),
    [
        (httpx.ConnectError("refused"), "unreachable"),
        (httpx.ConnectTimeout("lost"), "unreachable"),
        (httpx.ReadTimeout("stuck"), "silent"),
        (httpx.RemoteProtocolError("not HTTP"), "silent"),
        ("a page", "silent"),
        (make_app("prefill", secret=OTHER_SECRET), "other_secret"),
        (make_app("prefill", secret=OTHER_SECRET, keys=["k"]), "refused"),
        (make_app("decode"), "other_role"),
        (FastAPI(), "no_plugin"),
    ],
)
def test_d_says_why_a_p_is_of_no_use(p, state):
    """Each state has another fix, so they are told apart; no reply holds more than the state."""
    assert seen_by_decode(p) == {"state": state}


def test_d_says_that_a_p_has_no_connector():
    """Plugins without a connector: another fix than no plugins."""
    app = FastAPI()
    app.include_router(engine_route.router)
    assert seen_by_decode(app) == {"state": "no_connector"}


def test_a_d_that_names_itself_looks_once():
    """D among its own prefill_urls is found, and does not ask itself for ever."""
    network = Network({})
    app = make_app("decode", urls=["http://d", "http://p"], transport=network)
    network.hosts |= {"d": app, "p": make_app("prefill")}
    states = [one["state"] for one in get(app, "/v1/bidikv/prefill").json()["prefill"]]
    assert states == ["other_role", "ready"]


def test_the_facts_of_an_engine_are_plain_values(vllm_config):
    """They survive JSON, and two engines of the same model on different paths tell the same `model`."""
    transfer = SimpleNamespace(
        kv_connector="BidiKVConnector",
        kv_role="kv_both",
        kv_connector_extra_config={"bidirectional_kv_xfer": True},
    )
    fields = ("model_config", "cache_config", "scheduler_config")
    config = SimpleNamespace(**{name: getattr(vllm_config, name) for name in fields}, kv_transfer_config=transfer)
    facts = compat.engine_facts(config)
    assert json.loads(json.dumps(facts)) == facts
    assert (facts["dtype"], facts["block_size"], facts["kv_role"]) == ("float32", 32, "kv_both")
    assert (facts["bidirectional_kv_xfer"], facts["kv_recompute_threshold"]) == (True, 64)
    assert (facts["prefix_caching"], facts["platform"]) == (True, "cpu")
