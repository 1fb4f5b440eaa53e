import pytest

from tests.analysis.logs import chat, parse, user


@pytest.mark.parametrize("empty", ["", " \t", True])
def test_an_empty_id_is_none(empty):
    """An id without a character names nobody: the next name counts, and without one the prompt tells the session."""
    (one, two, three), _ = parse(
        [
            chat([user("a")], session=empty, conversation_id="c", request_id=empty, id="r"),
            chat([user("b")], session=empty, metadata={"session_id": "m"}, request_id=empty),
            chat([user("c")], session=empty),
        ]
    )
    assert [one.session_id, two.session_id, three.session_id] == ["c", "m", None]
    assert [one.request_id, two.request_id] == ["r", None]


@pytest.mark.parametrize("prompt", [{"input": {"messages": [user("hi")]}}, {"input": [user("hi")]}])
def test_input_is_a_body_or_a_prompt(prompt):
    """Under `input` lies a whole body, as tracers log it, or the prompt of a Responses body."""
    (request,), _ = parse([prompt])
    assert [part.kind.name for part in request.parts] == ["USER"]


@pytest.mark.parametrize("empty", [[], "", None])
@pytest.mark.parametrize("name", ["prompt_token_ids", "input_ids", "messages", "input"])
def test_an_empty_prompt_hides_no_other(name, empty):
    """A body may have all names of a prompt: the one with something in it counts, also outside of the body."""
    filled = {"prompt": "x" * 400}
    for line in ({name: empty, **filled}, {"request": {name: empty, **filled}}, {"request": {name: empty}, **filled}):
        (request,), problems = parse([line])
        assert request.num_prompt_tokens == 100
        assert not problems.counts


@pytest.mark.parametrize("prompt", [[7] * 130, "x" * 520])
def test_a_list_of_one_prompt_is_that_prompt(prompt):
    """A completion of a list of prompts that is one prompt is the same request as without the list."""
    (plain, listed), problems = parse([{"prompt": prompt}, {"prompt": [prompt]}])
    assert (listed.num_prompt_tokens, listed.chunk_ids) == (130, plain.chunk_ids)
    assert not problems.counts


@pytest.mark.parametrize(
    "several", [{"prompt": [[1, 2], [3]]}, {"prompt": ["a", "b"]}, {"input": ["a", "b"]}, {"messages": [[user("a")]] * 2}]
)
def test_several_prompts_in_one_request_are_no_turn(several):
    """Prompts side by side are not one conversation's: they are counted and left out."""
    requests, problems = parse([several, chat([user("x")])])
    assert len(requests) == 1
    assert problems.counts == {"several_prompts": 1}
    assert problems.first_seen["several_prompts"] == "log:1"
