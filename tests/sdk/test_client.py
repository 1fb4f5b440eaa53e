"""The clients: settings from arguments and environment, headers, and closing."""

import httpx
import pytest

import bidikv_sdk
from bidikv_sdk.testing import FakeServer

pytestmark = pytest.mark.anyio

CLASSES = [bidikv_sdk.BidiKV, bidikv_sdk.AsyncBidiKV]


def recording(cls, seen, **options):
    """Make a client whose requests are noted in `seen` and answered with an empty list."""

    def handle(request):
        seen.append(request)
        return httpx.Response(200, json={"data": []})

    transport = httpx.MockTransport(handle)
    http = httpx.Client(transport=transport) if cls is bidikv_sdk.BidiKV else httpx.AsyncClient(transport=transport)
    return cls(http_client=http, **options)


async def listed(client):
    """List the sessions with either flavour."""
    found = client.sessions()
    return found if isinstance(found, list) else await found


@pytest.mark.parametrize("cls", CLASSES)
@pytest.mark.parametrize(
    ("environment", "url", "key"),
    [
        ({"BIDIKV_BASE_URL": "http://a/v1"}, "http://a/v1/sessions", None),
        ({"BIDIKV_BASE_URL": "http://a/v1/", "BIDIKV_API_KEY": "j"}, "http://a/v1/sessions", "Bearer j"),
        ({"BIDIKV_BASE_URL": "http://a/v1", "OPENAI_API_KEY": "k"}, "http://a/v1/sessions", None),
    ],
)
async def test_settings_come_from_the_environment(cls, environment, url, key, monkeypatch):
    """Address and key come from the SDK's own variables; another service's key is never sent along."""
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    seen = []
    assert await listed(recording(cls, seen)) == []
    assert str(seen[0].url).partition("?")[0] == url
    assert seen[0].headers.get("authorization") == key


@pytest.mark.parametrize("cls", CLASSES)
async def test_arguments_beat_the_environment_and_headers_are_added(cls, monkeypatch):
    """What is passed counts; default headers reach every request and may replace the SDK's."""
    monkeypatch.setenv("BIDIKV_BASE_URL", "http://a/v1")
    monkeypatch.setenv("BIDIKV_API_KEY", "j")
    seen = []
    client = recording(cls, seen, base_url="http://c/v1", api_key="k", default_headers={"X-Team": "t"})
    await listed(client)
    assert str(seen[0].url).partition("?")[0] == "http://c/v1/sessions"
    assert seen[0].headers["authorization"] == "Bearer k"
    assert seen[0].headers["x-team"] == "t"
    assert seen[0].headers["user-agent"] == "bidikv-sdk"


@pytest.mark.parametrize("cls", CLASSES)
def test_a_missing_or_impossible_base_url_is_named_with_the_fix(cls):
    """Without a base URL there is nobody to talk to, and no request would tell so clearly."""
    with pytest.raises(bidikv_sdk.ConfigurationError, match="set BIDIKV_BASE_URL"):
        cls()
    with pytest.raises(bidikv_sdk.ConfigurationError, match="must start with http"):
        cls("localhost:8200/v1")


async def test_a_closed_client_refuses_to_send(client):
    """After the block every call is misuse, with a clear message."""
    async with client:
        await client.sessions()
    with pytest.raises(bidikv_sdk.ClientClosed, match="was closed"):
        await client.sessions()


async def test_only_its_own_http_client_is_closed(client, server):
    """An injected HTTP client belongs to the caller; one of the SDK's own is closed with it."""
    http = httpx.AsyncClient(transport=server.async_transport())
    await server.async_client(http_client=http).close()
    assert not http.is_closed
    await http.aclose()
    bidikv_sdk.BidiKV("http://a/v1").close()
    await bidikv_sdk.AsyncBidiKV("http://a/v1").close()


async def test_a_real_connection_that_is_refused_is_a_connection_error():
    """Without any server the SDK's own error comes out, after the retries asked for."""
    client = bidikv_sdk.BidiKV("http://127.0.0.1:9/v1", max_retries=0)
    with client, pytest.raises(bidikv_sdk.APIConnectionError, match=r"ConnectError at 127\.0\.0\.1:9") as caught:
        client.sessions()
    assert not caught.value.may_have_arrived


async def test_the_api_key_opens_the_server(make_client):
    """A server with a key refuses others."""
    server = FakeServer(api_key="right")
    await make_client(server).sessions()
    with pytest.raises(bidikv_sdk.AuthenticationError):
        await make_client(server, api_key="wrong").sessions()


async def test_all_sessions_are_listed_however_many(server, make_client):
    """The list comes in pages, which the caller does not see."""
    client = make_client(server)
    names = {f"s {number}&?" for number in range(1201)}
    async with httpx.AsyncClient(transport=server.async_transport()) as http:
        for name in names:
            body = {"session_id": name, "bidikv": {"protocol": 1}}
            await http.post("http://fake/v1/sessions", json=body, headers={"X-Session-ID": name})
    server.requests.clear()
    found = await client.sessions()
    assert ({info.session for info in found}, len(found)) == (names, 1201)
    assert [request.verb for request in server.requests] == ["list"] * 3
