"""What is refused, by which name; a refused call leaves its session as it was."""

from typing import Any

import pytest

from server_ext.launch.tiny import TINY

from .common import MAX_MODEL_LEN, eventually
from .rig import Rig
from .talk import words

IMAGE = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://127.0.0.1/a.png"}}]}]
EXPIRED = "vllm:nixl_num_kv_expired_reqs_total"
TRANSFER = {"do_remote_prefill": True, "remote_block_ids": [[1, 2]]}


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("change", "status", "code", "param"),
    [
        ({"n": 2}, 400, "unsupported_parameter", "n"),
        ({"messages": IMAGE}, 400, "unsupported_parameter", "messages[0].content"),
        ({"echo": True}, 400, "unsupported_parameter", "echo"),
        ({"prompt_logprobs": 1}, 400, "unsupported_parameter", "prompt_logprobs"),
        ({"cache_salt": "mine"}, 400, "unsupported_parameter", "cache_salt"),
        ({"kv_transfer_params": TRANSFER}, 400, "unsupported_parameter", "kv_transfer_params"),
        ({"kv_transfer_params": {}}, 400, "unsupported_parameter", "kv_transfer_params"),
        ({"vllm_xargs": {"a": "b"}}, 400, "unsupported_parameter", "vllm_xargs"),
        ({"continue_final_message": True}, 400, "unsupported_parameter", "continue_final_message"),
        ({"add_generation_prompt": False}, 400, "unsupported_parameter", "add_generation_prompt"),
        ({"bidikv": {"route": "teleport"}}, 400, "invalid_request", "bidikv.route"),
        ({"bidikv": {"ttl_s": 0}}, 400, "invalid_request", "bidikv.ttl_s"),
        ({"bidikv": {"ttl_s": "long"}}, 400, "invalid_request", "bidikv.ttl_s"),
        ({"bidikv": {"protocol": 2}}, 400, "protocol_mismatch", "bidikv.protocol"),
        ({"bidikv": []}, 400, "invalid_request", "bidikv"),
        ({"messages": []}, 400, "invalid_request", "messages"),
        ({"messages": "Hi"}, 400, "invalid_request", "messages"),
        ({"messages": [{"role": "nobody", "content": 7}]}, 400, "invalid_request", "messages[0].content"),
        ({"tools": "hammer"}, 400, "invalid_request", "tools"),
        ({"turn": 0}, 400, "invalid_request", "turn"),
        ({"session_id": "another"}, 400, "invalid_request", "session_id"),
        ({"temperature": "hot"}, 400, "invalid_request", "temperature"),
        ({"max_tokens": MAX_MODEL_LEN}, 400, "context_length_exceeded", "messages"),
        ({"messages": [{"role": "user", "content": words(900)}]}, 400, "context_length_exceeded", "messages"),
        ({"model": "another"}, 404, "model_not_found", "model"),
    ],
)
def test_a_turn_that_is_refused(
    rig: Rig, stream: bool, change: dict[str, Any], status: int, code: str, param: str
) -> None:
    """A turn that cannot be run is refused by name, before anything changes."""
    talk = rig.talk()
    talk.right_turn(words(60))
    before = talk.info()
    response = talk.post("turns", {**talk.request("Please.", stream=stream), **change})
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert (error["code"], error["param"]) == (code, param)
    assert error["message"]
    assert response.headers["x-request-id"]
    after = talk.info()
    assert after | {"lease": 0} == before | {"lease": 0}
    assert after["lease"]["num_tokens"] == before["lease"]["num_tokens"]
    talk.fetched_turn("Then not.")


@pytest.mark.parametrize("body", [b"{", b'"turn"', b"[]", b"\xff"])
@pytest.mark.parametrize("verb", ["turns", "extend", "release", "end"])
def test_a_body_that_is_no_object(rig: Rig, verb: str, body: bytes) -> None:
    """A body that is not a JSON object is refused on every route."""
    talk = rig.talk()
    talk.right_turn(words(60))
    response = rig.decode.post(f"/v1/sessions/{talk.id}/{verb}", content=body, headers=talk.headers)
    assert (response.status_code, response.json()["error"]["code"]) == (400, "invalid_request")
    assert talk.lease()["state"] == "active"


def test_a_body_that_is_too_large(rig: Rig) -> None:
    """A body that no chat can have is refused before it is parsed."""
    response = rig.talk().post("turns", "x" * (65 << 20))
    assert (response.status_code, response.json()["error"]["code"]) == (413, "request_too_large")


@pytest.mark.parametrize(
    ("method", "verb"), [("GET", ""), ("DELETE", ""), ("POST", "/extend"), ("POST", "/release"), ("POST", "/end")]
)
def test_an_unknown_session(rig: Rig, method: str, verb: str) -> None:
    """Every verb on an unknown id is a 404 that tells how to go on."""
    response = rig.decode.request(method, f"/v1/sessions/nobody{verb}")
    assert (response.status_code, response.json()["error"]["code"]) == (404, "session_not_found")
    assert "open it again" in response.json()["error"]["message"]


def test_a_session_is_named_alike_everywhere(rig: Rig) -> None:
    """A header that names another session than the path is refused."""
    talk = rig.talk()
    talk.right_turn(words(60))
    response = rig.decode.post(f"/v1/sessions/{talk.id}/release", headers={"X-Session-ID": "another"})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "X-Session-ID")


def test_a_prefill_node_is_no_home(rig: Rig) -> None:
    """P keeps no sessions: every session route there is a 404 that names decode nodes."""
    body = {"model": TINY, "session_id": "s", "turn": 1, "messages": [{"role": "user", "content": "Hi"}]}
    for response in (
        rig.prefill.get("/v1/sessions"),
        rig.prefill.post("/v1/sessions", json={"session_id": "s"}),
        rig.prefill.post("/v1/sessions/s/turns", json=body),
    ):
        assert (response.status_code, response.json()["error"]["code"]) == (404, "session_not_found")
        assert "decode node" in response.json()["error"]["message"]


@pytest.mark.parametrize("request_id", ["a,b", "HB:x", "bidikv-ticket-x", "x:1"])
def test_a_request_id_that_means_something_between_engines(rig: Rig, request_id: str) -> None:
    """P learns as ever that D has read what it computed, and holds nothing any longer."""
    num_before = rig.metric("prefill", EXPIRED)
    talk = rig.talk()
    talk.headers["X-Request-Id"] = request_id
    talk.right_turn(words(100))
    talk.fetched_turn("And now?")

    def is_free() -> bool:
        rig.step("prefill")
        return rig.metric("prefill", "vllm:kv_cache_usage_perc") == 0

    eventually(is_free, "P without anything to keep for D")
    # It let go since D has read, and not since its hold was over.
    assert rig.metric("prefill", EXPIRED) == num_before


def test_the_callers_request_id_comes_back(rig: Rig) -> None:
    """`X-Request-Id` is echoed, in good replies and in refusals; turns of one id at a time do not clash."""
    talks = [rig.talk() for _ in range(2)]
    for talk in talks:
        talk.headers["X-Request-Id"] = "mine"
    running = [talk.in_background(words(100), max_tokens=100) for talk in talks]
    assert [said.result().came for said in running] == [("recomputed", "first_turn")] * 2
    assert talks[0].post("release").headers["x-request-id"] == "mine"
    assert talks[0].post("extend").headers["x-request-id"] == "mine"
