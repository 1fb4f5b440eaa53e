"""What a session's turn gives is what vLLM's own route gives, whatever the caller asks for: real engines, a real model.

A first turn is compared with the same messages on the chat route of the same D without a session. A later one, whose
history was fetched, goes on from ids that no text gives back: it is compared with the same ids, computed on P.
"""

import secrets
from typing import Any

import httpx
import pytest

from server_ext.launch.tiny import TINY

from .rig import Rig
from .talk import Talk, read_completion, words

CHAT = "/v1/chat/completions"
SCHEMA = {
    "type": "object",
    "properties": {"color": {"enum": ["red", "green"]}, "size": {"type": "integer"}},
    "required": ["color", "size"],
    "additionalProperties": False,
}
NAMED_SCHEMA = {"name": "thing", "schema": SCHEMA, "strict": True}
TOOL = {"type": "function", "function": {"name": "look", "parameters": SCHEMA}}

# What the caller of a chat asks for, and the same for vLLM's route of plain completions.
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "nothing": ({}, {}),
    "logprobs": ({"logprobs": True, "top_logprobs": 3}, {"logprobs": 3}),
    "a schema": (
        {"response_format": {"type": "json_schema", "json_schema": NAMED_SCHEMA}},
        {"structured_outputs": {"json": SCHEMA}},
    ),
    "a seed": ({"temperature": 0.9, "seed": 11}, {"temperature": 0.9, "seed": 11}),
    "penalties": (
        {"presence_penalty": 1.0, "repetition_penalty": 1.3},
        {"presence_penalty": 1.0, "repetition_penalty": 1.3},
    ),
}


def said(reply: httpx.Response) -> dict[str, Any]:
    """Return what a reply says, ids of tool calls left out."""
    assert reply.status_code == 200, reply.text
    whole = reply.json()
    (choice,) = whole["choices"]
    return {
        "prompt_ids": whole["prompt_token_ids"],
        "ids": choice["token_ids"],
        "content": choice["message"]["content"],
        "calls": [call["function"] for call in choice["message"].get("tool_calls") or ()],
        "finish_reason": choice["finish_reason"],
        "logprobs": choice["logprobs"],
        "completion_tokens": whole["usage"]["completion_tokens"],
    }


def logprobs_of(choice: dict[str, Any]) -> list[Any]:
    """Return the log probabilities of a chat's tokens, each with those of the likeliest."""
    return [
        (one["logprob"], *sorted((top["logprob"] for top in one["top_logprobs"]), reverse=True))
        for one in choice["logprobs"]["content"]
    ]


def same(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    """Compare two replies: the last bits of a probability are another matter."""
    if theirs["logprobs"] is not None:
        assert len(logprobs_of(ours)) == len(theirs["ids"]) > 0
        for mine, its in zip(logprobs_of(ours), logprobs_of(theirs), strict=True):
            assert mine == pytest.approx(its, abs=1e-3)
        tokens = [[one["token"] for one in choice["logprobs"]["content"]] for choice in (ours, theirs)]
        assert tokens[0] == tokens[1]
    assert {**ours, "logprobs": None} == {**theirs, "logprobs": None}


@pytest.mark.parametrize("case", [*CASES, "a named call", "a required call"])
def test_a_first_turn(rig: Rig, case: str) -> None:
    """On vLLM's route with a session, and on ours, the reply is that of vLLM's route without one."""
    calls = {
        "a named call": {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "look"}}},
        "a required call": {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": True},
    }
    chat = {"max_tokens": 40, **(calls[case] if case in calls else CASES[case][0])}
    messages = [{"role": "user", "content": words(80)}]
    body = {"model": TINY, "messages": messages, "temperature": 0, "return_token_ids": True, **chat}
    plain = rig.decode.post(CHAT, json=body)
    assert "bidikv" not in plain.json()
    with_session = rig.decode.post(CHAT, json={**body, "session_id": "chat"})
    assert with_session.json()["bidikv"]["turn"] == 1
    same(said(with_session), said(plain))
    talk = Talk(rig, "turns", {})
    same(said(talk.post("turns", talk.request(messages, **chat))), said(plain))


@pytest.mark.parametrize("case", CASES)
def test_a_turn_whose_history_was_fetched(rig: Rig, case: str) -> None:
    """Tokens and their probabilities are those of the same prompt, all of it computed."""
    chat, completion = CASES[case]
    talk = Talk(rig, "turns", {})
    talk.turn(words(80))
    reply = talk.post("turns", talk.request("Now this.", **{"max_tokens": 40, "route": "fetch", **chat}))
    ours = said(reply)
    assert read_completion(reply.json()).cache["outcome"] == "fetched"
    body = {"model": TINY, "prompt": ours["prompt_ids"], "temperature": 0, "max_tokens": 40, **completion}
    body |= {"return_token_ids": True, "cache_salt": secrets.token_hex(8)}
    (theirs,) = rig.prefill.post("/v1/completions", json=body).raise_for_status().json()["choices"]
    assert ours["ids"] == theirs["token_ids"]
    if "logprobs" in chat:
        best = [max(one.values()) for one in theirs["logprobs"]["top_logprobs"]]
        expected = list(zip(theirs["logprobs"]["token_logprobs"], best, strict=True))
        # Their likeliest tokens are told apart by their texts, and not all have one of their own.
        assert [mine[:2] for mine in logprobs_of(ours)] == [pytest.approx(its, abs=1e-3) for its in expected]
