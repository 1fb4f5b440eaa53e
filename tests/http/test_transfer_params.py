"""The middleware that keeps `kv_transfer_params` of clients away, and nothing else."""

import asyncio
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from server_ext.http import transfer_params
from server_ext.http.prefill_route import PREFILL_PATH
from server_ext.http.transfer_params import RefuseTransferParams

from .fakes import Caller, until

NAME = "kv_transfer_params"


class Echo:
    """A route that keeps what it receives."""

    def __init__(self):
        self.received = []

    async def __call__(self, scope, receive, send):
        """Read the body to its end, then once more."""
        more = True
        while more:
            self.received.append(await receive())
            more = self.received[-1].get("more_body", False)
        self.received.append(await receive())
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body", "body": b""})


def send(pieces, *, method="POST", path="/v1/completions", leaves_after_body=True):
    """Send a body in pieces; return the route and the messages that came back."""

    async def main():
        route = Echo()
        caller = Caller(RefuseTransferParams(route), method, path, pieces)
        if leaves_after_body:
            caller.leave()
        await caller.start()
        return route, caller.sent

    return asyncio.run(main())


REFUSED = {
    "at the top": json.dumps({"prompt": "a", NAME: {"do_remote_prefill": True}}).encode(),
    "empty": json.dumps({NAME: {}}).encode(),
    "in vLLM's extra arguments": json.dumps({"vllm_xargs": {NAME: "x"}}).encode(),
    "with escapes": b'{"kv\\u005ftransfer_params": {"a": 1}}',
    "in UTF-16": json.dumps({NAME: {"a": 1}}).encode("utf-16"),
    "in UTF-32": json.dumps({NAME: {"a": 1}}).encode("utf-32-le"),
}


@pytest.mark.parametrize("body", REFUSED.values(), ids=REFUSED)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/sessions/s/turns", "/inference/v1/generate"])
def test_transfer_parameters_are_refused(body, path):
    """Regression: with an escape in the name, or in UTF-16, they passed."""
    route, sent = send([body], path=path)
    assert route.received == []
    assert sent[0]["status"] == 400
    error = json.loads(sent[1]["body"])["error"]
    assert (error["code"], error["param"]) == ("unsupported_parameter", NAME)
    assert "leave it out" in error["message"]


def test_they_are_found_across_pieces():
    """A body in pieces is looked at as a whole."""
    body = REFUSED["at the top"]
    _, sent = send([body[:20], body[20:25], body[25:]])
    assert sent[0]["status"] == 400


PASSED = {
    "none": b"",
    "null": json.dumps({NAME: None}).encode(),
    "only in a text": json.dumps({"prompt": NAME}).encode(),
    "deeper, where vLLM does not look": json.dumps({"messages": [{NAME: 1}]}).encode(),
    "no object": json.dumps([NAME]).encode(),
    "no JSON": NAME.encode(),
    "nested without end": b"[" * 100_000 + NAME.encode(),
    "bytes": bytes(range(256)),
}


@pytest.mark.parametrize("body", PASSED.values(), ids=PASSED)
def test_all_else_passes(body):
    """What is no transfer parameter is the route's business."""
    route, sent = send([body])
    assert [message.get("body") for message in route.received] == [body, None]
    assert sent[0]["status"] == 204


@settings(max_examples=50, deadline=None)
@given(pieces=st.lists(st.binary(max_size=20), min_size=1, max_size=5))
def test_pieces_pass_as_they_came(pieces):
    """Chunked bodies reach the route byte for byte, and the disconnect after them does too."""
    route, _ = send(pieces)
    *body, left = route.received
    assert [message["body"] for message in body] == pieces
    assert left == {"type": "http.disconnect"}


def test_a_client_that_leaves_within_its_body():
    """The route hears of it."""

    async def main():
        route = Echo()
        caller = Caller(RefuseTransferParams(route), "POST", "/", [b"a", b"b"])
        caller.drop_last_piece()
        caller.leave()
        caller.leave()
        await caller.start()
        return [message["type"] for message in route.received]

    assert asyncio.run(main()) == ["http.request", "http.disconnect", "http.disconnect"]


def test_a_body_without_end_is_not_kept(monkeypatch):
    """Behind the limit of a session's body its pieces pass as they come, unseen."""
    monkeypatch.setattr(transfer_params, "MAX_BODY_BYTES", 10)

    async def main():
        route = Echo()
        pieces = [b"x" * 6, b"y" * 6, b"z", REFUSED["at the top"]]
        caller = Caller(RefuseTransferParams(route), "POST", "/", pieces)
        caller.drop_last_piece()
        call = caller.start()
        await asyncio.wait_for(until(lambda: len(route.received) == 3), 5)
        assert not call.done()
        caller.leave()
        caller.leave()
        await call
        return [message.get("body") for message in route.received]

    assert asyncio.run(main()) == [b"x" * 6, b"y" * 6, b"z", None, None]


@pytest.mark.parametrize(("method", "path"), [("GET", "/v1/models"), ("PUT", "/x"), ("POST", PREFILL_PATH)])
def test_other_calls_are_not_read(method, path):
    """Between D and P transfer parameters are what it is all about; the engine checks them."""
    route, sent = send([REFUSED["at the top"]], method=method, path=path)
    assert route.received[0]["body"] == REFUSED["at the top"]
    assert sent[0]["status"] == 204
