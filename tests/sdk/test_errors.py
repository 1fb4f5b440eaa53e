"""The error tree: complete, catchable at every level, and rich in what it carries."""

import inspect
import re

import pytest

import bidikv_sdk
from bidikv_sdk import _errors, wire

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("code", wire.ERROR_CODES)
async def test_every_code_has_its_class_and_status(code, client, server):
    """A reply with a code raises that code's class, with everything that the reply said."""
    server.fail(code, "no", param="p", retry_after_s=0.0, expected_turn=9, reason="released", on="get")
    server.fail(code, "no", param="p", retry_after_s=0.0, expected_turn=9, reason="released", on="get")
    server.fail(code, "no", param="p", retry_after_s=0.0, expected_turn=9, reason="released", on="get")
    with pytest.raises(_errors.ERROR_CLASS_BY_CODE[code]) as caught:
        await client.session().status()
    error = caught.value
    assert (error.code, error.status, error.param) == (code, wire.ERROR_STATUS[code], "p")
    assert (error.retry_after_s, error.expected_turn, error.reason) == (0.0, 9, "released")
    assert error.body["error"]["message"] == error.message == "no"
    assert error.request_id == server.requests[-1].headers["x-request-id"]
    assert str(error) == f"{error.status} {code}: no (request {error.request_id})"


@pytest.mark.parametrize(
    ("status", "error_class"),
    [
        (400, bidikv_sdk.BadRequestError),
        (401, bidikv_sdk.AuthenticationError),
        (403, bidikv_sdk.AuthenticationError),
        (404, bidikv_sdk.ServerExtensionMissing),
        (409, bidikv_sdk.ConflictError),
        (413, bidikv_sdk.RequestTooLarge),
        (418, bidikv_sdk.APIStatusError),
        (422, bidikv_sdk.BadRequestError),
        (429, bidikv_sdk.RateLimitError),
        (500, bidikv_sdk.InternalServerError),
        (502, bidikv_sdk.InternalServerError),
    ],
)
async def test_another_server_s_error_is_classed_by_status(status, error_class, make_client, server):
    """A reply without our error object has no code, but still a class, its body and its status."""
    client = make_client(server, max_retries=0)
    server.respond(status, "<html>oops</html>")
    with pytest.raises(error_class, match="oops") as caught:
        await client.sessions()
    assert type(caught.value) is error_class
    assert (caught.value.status, caught.value.code, caught.value.body) == (status, None, "<html>oops</html>")


async def test_a_server_without_the_plugin_is_named_with_the_fix(client, server):
    """Stock vLLM answers 404 in its own way; the message says how to enable the routes."""
    server.respond(404, {"error": {"message": "Not Found", "type": "NotFoundError", "code": 404}})
    with pytest.raises(bidikv_sdk.ServerExtensionMissing, match="VLLM_PLUGINS=bidikv,bidikv_http"):
        await client.session().send("hi")


def test_the_tree_in_the_docstring_is_the_tree():
    """Every class stands in the drawn tree under its parent, and nothing else does."""
    drawn, parents = {}, []
    for line in (_errors.__doc__ or "").splitlines():
        if match := re.match(r"^    ([│ ]*)(?:[├└]── )?(\w+Error|\w+)(?: .*)?$", line):
            depth = len(re.match(r"^[│├└─ ]*", line[4:]).group()) // 4
            name = match.group(2)
            parents[depth:] = [name]
            drawn[name] = parents[depth - 1] if depth else None
    classes = {n: c for n, c in inspect.getmembers(_errors, inspect.isclass) if c.__module__ == _errors.__name__}
    assert set(drawn) == set(classes)
    for name, parent in drawn.items():
        bases = classes[name].__bases__
        assert bases == (classes[parent],) if parent else bases in {(Exception,), (RuntimeError,)}


def test_misuse_is_no_bidikv_error():
    """A bug of the caller is not swallowed by a handler for network and server trouble."""
    assert not issubclass(bidikv_sdk.MisuseError, bidikv_sdk.BidiKVError)
    assert issubclass(bidikv_sdk.SessionEnded, RuntimeError)
