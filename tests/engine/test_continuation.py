"""However a turn ends, the next one continues exactly what D has: all of it fetched, nothing tokenized again."""

import json
from typing import Any

import pytest

from .rig import Rig
from .talk import Said, Talk, words

EOS = 2  # <|im_end|>
CLOSING = "<|im_end|>\n"
TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "strict": True,
        "description": "Look at a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": ["Oslo", "Paris"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


def verify_prompt(rig: Rig, before: Said, after: Said, *, reply: str, delta: str) -> None:
    """Check the text of a prompt: the one before, its reply, and what the template writes around the delta."""
    whole = rig.text_of(before.prompt_ids) + reply + CLOSING + delta + "<|im_start|>assistant\n"
    assert rig.text_of(after.prompt_ids) == whole


def user(text: str) -> str:
    """Return a user's message as the template writes it."""
    return f"<|im_start|>user\n{text}{CLOSING}"


@pytest.fixture
def talk(rig: Rig) -> Talk:
    """A session that has had a turn."""
    talk = rig.talk()
    talk.right_turn(words(100))
    return talk


@pytest.mark.parametrize("stream", [True, False])
def test_after_length(rig: Rig, talk: Talk, stream: bool) -> None:
    """A turn that ran into its limit is continued."""
    said = talk.fetched_turn("Count.", stream=stream)
    assert said.finish_reason == "length"
    after = talk.fetched_turn("More.", stream=stream)
    assert after.prompt_ids[: len(said.prompt_ids) + len(said.ids)] == said.prompt_ids + said.ids
    verify_prompt(rig, said, after, reply=rig.text_of(said.ids), delta=user("More."))


@pytest.mark.parametrize("stream", [True, False])
def test_after_the_models_own_end(rig: Rig, talk: Talk, stream: bool) -> None:
    """A turn that the model ended is continued; its end token and the template's are one."""
    said = talk.turn("Be brief.", stream=stream, min_tokens=6, logit_bias={str(EOS): 100})
    assert (said.finish_reason, said.ids[-1]) == ("stop", EOS)
    after = talk.fetched_turn("More.", stream=stream)
    assert after.prompt_ids[: len(said.prompt_ids) + len(said.ids)] == said.prompt_ids + said.ids
    verify_prompt(rig, said, after, reply=rig.text_of(said.ids[:-1]), delta=user("More."))


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("inside", [False, True], ids=["a whole token", "inside a token"])
def test_after_a_stop_string(rig: Rig, talk: Talk, stream: bool, inside: bool) -> None:
    """A turn that a stop string cut is continued from what the client got, also where that ends inside a token."""
    scout = rig.talk()
    scout.turn(words(100))
    ids = scout.turn("Go on.", max_tokens=48).ids
    cut, stop = find_stop(rig, ids, inside=inside)
    said = talk.turn("Go on.", stream=stream, max_tokens=48, stop=[stop])
    assert said.finish_reason == "stop"
    assert said.message["content"] == cut
    after = talk.fetched_turn("More.", stream=stream)
    verify_prompt(rig, said, after, reply=cut, delta=user("More."))
    assert after.cache["held_tokens"] > len(said.prompt_ids)


def find_stop(rig: Rig, ids: list[int], *, inside: bool) -> tuple[str, str]:
    """Return a stop string in the text of these ids, and the text before it."""
    for place in range(4, len(ids)):
        text, piece = rig.text_of(ids[:place]), rig.text_of(ids[place : place + 1])
        whole = rig.text_of(ids[: place + 1])
        if not piece.strip().isalpha() or len(piece.strip()) < 4 or whole != text + piece:
            continue
        stop = piece[2:] if inside else piece
        cut = whole.removesuffix(stop)
        if whole.find(stop) == len(cut) and rig.text_of(ids).startswith(whole):
            return cut, stop
    pytest.fail(f"no token of {rig.text_of(ids)!r} can serve as a stop string")


def no_blanks(rig: Rig) -> dict[str, Any]:
    """Keep a random model from the blanks that JSON allows everywhere, or it would never come to its end."""
    (blank,) = rig.ids_of(" ")
    letters = [token for letter in map(chr, range(33, 127)) for token in rig.ids_of(letter)]
    return {"allowed_token_ids": [*letters, blank, EOS], "logit_bias": {str(blank): -100}}


@pytest.mark.parametrize("stream", [True, False])
def test_after_a_tool_call(rig: Rig, talk: Talk, stream: bool) -> None:
    """A turn that called a tool is continued with the tool's result."""
    choice = {"type": "function", "function": {"name": "look"}}
    said = talk.turn("Look.", stream=stream, tools=[TOOL], tool_choice=choice, max_tokens=200, **no_blanks(rig))
    (call,) = said.message["tool_calls"]
    assert call["function"]["name"] == "look"
    assert json.loads(call["function"]["arguments"])["city"] in ("Oslo", "Paris")
    result = {"role": "tool", "tool_call_id": call["id"], "content": "Sunny."}
    after = talk.fetched_turn([result], stream=stream)
    generated = said.ids[:-1] if said.ids[-1] == EOS else said.ids
    assert after.prompt_ids[: len(said.prompt_ids) + len(generated)] == said.prompt_ids + generated
    written = f"<|im_start|>tool\n<tool_response>\nSunny.\n</tool_response>{CLOSING}"
    verify_prompt(rig, said, after, reply=rig.text_of(generated), delta=written)
    talk.fetched_turn("Thanks.", stream=stream)


@pytest.mark.parametrize("stream", [True, False])
def test_after_an_early_close(rig: Rig, talk: Talk, stream: bool) -> None:
    """A turn whose client left is not part of the session; the lease before it stays, and so does the session."""
    before, lease = talk.last, talk.lease()
    body = talk.request("Never mind.", stream=stream, max_tokens=1200, ignore_eos=True)
    with talk.asked(body):
        pass
    talk.wait_until_idle()
    after = talk.info()
    assert after["turn"] == talk.num_turns
    assert after["lease"] | {"remaining_s": 0} == lease | {"remaining_s": 0}
    said = talk.fetched_turn("Something else.", stream=stream)
    verify_prompt(rig, before, said, reply=rig.text_of(before.ids), delta=user("Something else."))
