"""One turn at a time, each of them once: what a repeated, an old and a simultaneous call get."""

import json

import pytest

from .rig import Rig
from .talk import events_of, read_stream, words


@pytest.mark.parametrize("again", [True, False], ids=["streamed again", "whole again"])
@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
def test_the_same_call_gets_the_same_reply(rig: Rig, stream: bool, again: bool) -> None:
    """A repeated number and key returns the stored reply, in either form, and appends nothing."""
    talk = rig.talk()
    talk.right_turn(words(60))
    body = talk.request("And now?", stream=stream)
    said = talk.turn("And now?", stream=stream, key="once")
    generated = rig.metric("decode", "vllm:generation_tokens_total")
    response = talk.post("turns", {**body, "stream": again}, key="once")
    assert response.status_code == 200
    if again:
        *deltas, last = events_of(response.text)
        message = deltas[0]["choices"][0]["delta"]
        finish_reason, bidikv = deltas[0]["choices"][0]["finish_reason"], last["bidikv"]
        assert (len(deltas), last["choices"]) == (1, [])
        assert last["usage"]["completion_tokens"] == len(said.ids)
    else:
        reply = response.json()
        message, finish_reason = reply["choices"][0]["message"], reply["choices"][0]["finish_reason"]
        bidikv = reply["bidikv"]
        assert reply["usage"]["completion_tokens"] == len(said.ids)
    assert (message["content"], finish_reason) == (said.message["content"], said.finish_reason)
    assert bidikv["turn"] == 2
    assert bidikv["cache"] | {"timings_s": 0} == said.cache | {"timings_s": 0}
    assert bidikv["lease"]["num_tokens"] == said.lease["num_tokens"]
    rig.step("decode")
    assert rig.metric("decode", "vllm:generation_tokens_total") == generated + 1  # of the step itself
    talk.fetched_turn("And then?")


@pytest.mark.parametrize(("number", "key"), [(2, "another"), (1, "once"), (4, "once"), (9, None)])
def test_a_number_that_does_not_fit(rig: Rig, number: int, key: str | None) -> None:
    """An old number, a future one, and the last one with another key are conflicts that name the right number."""
    talk = rig.talk()
    talk.turn(words(60), key="first")
    talk.turn("And now?", key="once")
    response = talk.post("turns", talk.request("Me!", turn=number), key=key)
    assert response.status_code == 409
    error = response.json()["error"]
    assert (error["code"], error["expected_turn"]) == ("turn_conflict", 3)
    talk.fetched_turn("And then?")


def test_two_turns_at_once(rig: Rig) -> None:
    """A turn beside a running one is refused with a time to wait, and the running one is not disturbed."""
    talk = rig.talk()
    talk.right_turn(words(60))
    body = talk.request("Tell me.", stream=True, max_tokens=600, ignore_eos=True)
    with rig.decode.stream("POST", f"/v1/sessions/{talk.id}/turns", json=body, headers=talk.headers) as response:
        lines = response.iter_lines()
        begun = next(lines)
        refused = talk.post("turns", talk.request("Me first!"), key="other")
        said = read_stream("\n".join([begun, *lines, ""]))
    talk.took(said)
    assert refused.status_code == 409
    error = refused.json()["error"]
    assert error["code"] == "turn_conflict"
    assert 0 < error["retry_after_s"] < 60
    assert int(refused.headers["retry-after"]) >= 1
    assert len(said.ids) == 600
    talk.fetched_turn("And then?")


def test_open_is_idempotent_and_takes_over_on_demand(rig: Rig) -> None:
    """Opening a session again changes nothing; another turn count is a conflict unless it replaces the transcript."""
    talk = rig.talk()
    opening = {"session_id": talk.id, "turn": 0}
    url, headers = "/v1/sessions", talk.headers
    for _ in range(2):
        assert rig.decode.post(url, json=opening, headers=headers).json()["bidikv"]["turn"] == 0
    talk.right_turn(words(100))
    history = [
        {"role": "user", "content": words(100)},
        {"role": "assistant", "content": "So it is."},
        {"role": "user", "content": "Is it?"},
        {"role": "assistant", "content": "Yes."},
    ]
    other = {"session_id": talk.id, "turn": 2, "messages": history}
    refused = rig.decode.post(url, json=other, headers=headers)
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "turn_conflict")
    replaced = rig.decode.post(url, content=json.dumps({**other, "replace": True}), headers=headers).json()["bidikv"]
    assert replaced["turn"] == 2
    assert replaced["lease"]["num_tokens"] == talk.last.lease["num_tokens"]
    talk.num_turns, talk.last = 2, None
    # The first turn's prompt is still held; only its reply was another one.
    said = talk.right_turn("Really?")
    assert said.came == ("fetched", "messages_changed")
    assert said.cache["fetched_tokens"] == said.cache["diverged_at"] < said.cache["held_tokens"]
    talk.fetched_turn("Good.")
