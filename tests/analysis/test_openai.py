import pytest

from tests.analysis.logs import chat, parse, report_of, user


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
    "several",
    [{"prompt": [[1, 2], [3]]}, {"prompt": ["a", "b"]}, {"input": ["a", "b"]}, {"messages": [[user("a")]] * 2}],
)
def test_several_prompts_in_one_request_are_no_turn(several):
    """Prompts side by side are not one conversation's: they are counted and left out."""
    requests, problems = parse([several, chat([user("x")])])
    assert len(requests) == 1
    assert problems.counts == {"several_prompts": 1}
    assert problems.first_seen["several_prompts"] == "log:1"


@pytest.mark.parametrize("bad", [-1, True, 1.5e300, 10**30, 2**29 + 1, "300", {"text": 300}])
@pytest.mark.parametrize("name", ["prompt_tokens", "completion_tokens", "cached_tokens"])
def test_a_count_that_cannot_be_is_no_count(name, bad):
    """What no count of tokens can be is counted, and the request goes on as if it were not there."""
    usage = {"prompt_tokens": 300, "completion_tokens": 7, "cached_tokens": 128}
    wanted = {"prompt_tokens": 25, "completion_tokens": 0, "cached_tokens": None}
    (request,), problems = parse([{"prompt": "x" * 100, "usage": {**usage, name: bad}}])
    found = (request.num_prompt_tokens, request.num_output_tokens, request.num_cached_tokens)
    assert dict(zip(usage, found, strict=True))[name] == wanted[name]
    assert problems.counts == {"bad_count": 1}
    assert request.is_estimated == (name == "prompt_tokens")


def test_a_count_that_is_no_json_number():
    """What Python writes for no number is no JSON: the line is malformed."""
    requests, problems = parse([{"prompt": "x", "usage": {"prompt_tokens": float("nan")}}])
    assert not requests
    assert problems.counts == {"malformed_line": 1}


def test_no_more_of_a_prompt_is_cached_than_it_has():
    """More cached tokens than the prompt has is a log that counts otherwise, not a prompt that is all there."""
    (request,), problems = parse([{"prompt": "x" * 100, "usage": {"prompt_tokens": 12, "cached_tokens": 50_000}}])
    assert (request.num_prompt_tokens, request.num_cached_tokens) == (12, None)
    assert problems.counts == {"bad_count": 1}


@pytest.mark.parametrize("count", [2**29, 2**30, 2**31])
def test_the_longest_counts_fit_into_a_row(count):
    """A prompt and its answer together, what the next turn finds, do not overflow."""
    usage = {"prompt_tokens": count, "completion_tokens": count}
    report = report_of([chat([user("x" * 100)], t=t, usage=usage) for t in (0, 5)])
    assert report.reuse.num_turns == 2


def test_a_prompt_of_no_tokens_is_of_unknown_length():
    """A count of 0 is what a gateway writes that does not know: the length is estimated, or there is no prompt."""
    usage = {"prompt_tokens": 0, "completion_tokens": 7}
    (request,), problems = parse([{"prompt": "x" * 100, "usage": usage}, {"usage": usage}])
    assert (request.num_prompt_tokens, request.is_estimated, request.num_output_tokens) == (25, True, 7)
    assert problems.counts == {"no_prompt": 1}


APART = {"input_tokens": 12, "cache_read_input_tokens": 50_000, "cache_creation_input_tokens": 300}


@pytest.mark.parametrize(
    ("usage", "num_prompt", "num_cached"),
    [
        (APART, 50_312, 50_000),
        ({**APART, "cache_creation_input_tokens": None}, 50_012, 50_000),
        ({"input_tokens": 0, "cache_creation_input_tokens": 300}, 300, None),
        # OpenAI's input has the cached ones in it, and so has the prompt that a gateway makes of Anthropic's usage.
        ({"input_tokens": 50_312, "input_tokens_details": {"cached_tokens": 50_000}}, 50_312, 50_000),
        ({**APART, "prompt_tokens": 50_312, "prompt_tokens_details": {"cached_tokens": 50_000}}, 50_312, 50_000),
        ({**APART, "prompt_tokens": 50_312}, 50_312, 50_000),
    ],
)
def test_cached_tokens_beside_the_input_and_in_it(usage, num_prompt, num_cached):
    """Anthropic counts cached tokens beside the input, OpenAI in it: the prompt is all that the model has read."""
    (request,), problems = parse([{"messages": [user("x")], "usage": usage}])
    assert (request.num_prompt_tokens, request.num_cached_tokens) == (num_prompt, num_cached)
    assert not problems.counts


def test_a_sum_that_no_prompt_has_is_no_count():
    """Counts that can be, each by itself, but not together."""
    (request,), problems = parse([{"prompt": "x" * 100, "usage": dict.fromkeys(APART, 2**29)}])
    assert (request.num_prompt_tokens, request.is_estimated) == (25, True)
    assert problems.counts == {"bad_count": 1}


@pytest.mark.parametrize("name", ["latency", "duration", "e2e_latency"])
def test_a_duration_without_a_unit(name):
    """It is in seconds if a request may take so long; 2,340 are 39 minutes or 2.3 seconds, and nobody knows."""
    (known, unknown), problems = parse([chat([user("x")], t=t, duration_s=None, **{name: t}) for t in (600, 2340)])
    assert (known.end_s - known.start_s, unknown.end_s) == (600, None)
    assert problems.counts == {"unknown_unit": 1}
    assert problems.first_seen["unknown_unit"] == "log:2"


def test_a_ttft_without_a_unit():
    """A first token comes sooner than an answer ends: seconds are believed up to a minute."""
    (known, unknown), problems = parse([chat([user("x")], ttft=ttft) for ttft in (60, 250)])
    assert (known.ttft_s, unknown.ttft_s) == (60, None)
    assert problems.counts == {"unknown_unit": 1}


def test_a_unit_in_the_name_is_believed():
    """However long it is, and before a name without one."""
    (slow, fast), problems = parse(
        [
            chat([user("x")], duration_s=2340, ttft_s=700),
            chat([user("x")], duration_s=None, latency=2340, latency_ms=2340, ttft=250, ttft_ms=250),
        ]
    )
    assert (slow.end_s - slow.start_s, slow.ttft_s) == (2340, 700)
    assert (fast.end_s - fast.start_s, fast.ttft_s) == (pytest.approx(2.34), 0.25)
    assert not problems.counts
