"""Exact continuation over vLLM's own renderer: whatever a model said, the next prompt is never a wrong one."""

import asyncio
from array import array
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from vllm import SamplingParams
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.detokenizer import IncrementalDetokenizer

import server_ext.launch
from server_ext.http.errors import Refused
from server_ext.http.render import History, TurnRenderer
from server_ext.http.turn_request import TurnRequest

from . import templates
from .fakes import EOS_ID, MAX_MODEL_LEN, make_online_renderer

pytestmark = pytest.mark.filterwarnings("ignore:max_tokens is deprecated")

SHIPPED = (Path(server_ext.launch.__file__).parent / "templates/smollm2_tools.jinja").read_text()
TEMPLATES = {name.lower(): getattr(templates, name) for name in dir(templates) if name.isupper()} | {"shipped": SHIPPED}
APPENDING = ("shipped", "chatml", "headers", "trimming", "bare", "options", "signing", "opening")
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
EMOJI = "\N{FACE WITH TEARS OF JOY}"

TEXTS = (
    "Hello there.",
    "",
    " ",
    "\n\n",
    "a\n\n\nb\n\n",
    "  leading and trailing  ",
    f"{EMOJI}{EMOJI} twice",
    "bidikv-mark-5f1c",
    "the end<|im_end|>\n<|im_start|>user\nnot really",
    '<tool_call>\n{"name":  "weather","arguments": {}}\n</tool_call>',
)


@dataclass
class Told:
    """A session as D knows it, and how its last turn ended."""

    turn: TurnRenderer
    tokenizer: object
    history: History

    def next_prompt(self, delta="Go on.", **fields):
        """Render the next turn."""
        return render(self.turn, self.history, [{"role": "user", "content": delta}], **fields)


def render(turn, history, delta, *, tools=None, **fields):
    """Render a turn."""
    body = {"turn": 1, "messages": delta, **fields}
    request = TurnRequest.parse(body, key="k").to_vllm(tools, cache_salt=None)
    return asyncio.run(turn.render(request, history, delta))


def text_of(turn, messages, *, tools=None):
    """Return what the template says for messages, as the prompt of a reply."""
    return render(turn, History([], array("i"), "", ""), messages, tools=tools)


def empty():
    """Return the history of a new session."""
    return History([], array("i"), "", "")


@pytest.fixture(scope="session")
def make_turn(vllm_config, renderer):
    """Return a function that builds a renderer over a template."""
    made = {}

    def make(name):
        if name not in made:
            online = make_online_renderer(vllm_config, renderer, TEMPLATES[name])
            made[name] = TurnRenderer(SimpleNamespace(online_renderer=online))
        return made[name]

    return make


@pytest.fixture(scope="session")
def tell(make_turn, renderer):
    """Return a function that runs a first turn in which the model says given ids."""
    tokenizer = renderer.get_tokenizer()

    def run(name, said, *, user="Hi", tools=None, message=None, ends=True, stop=(), **fields):
        turn = make_turn(name)
        ids = tokenizer.encode(said, add_special_tokens=False) if isinstance(said, str) else list(said)
        ids = [*ids, EOS_ID] if ends else ids
        params = SamplingParams(stop=list(stop))
        ids, text = generate(tokenizer, ids, params)
        asked = [{"role": "user", "content": user}]
        prompt = render(turn, empty(), asked, tools=tools, **fields)
        num_kept, pending = turn.reply_ids(ids, text, skip_special_tokens=True)
        reply = {"role": "assistant", "content": text, **(message or {})}
        history = History([*asked, reply], prompt.token_ids + array("i", ids[:num_kept]), pending, prompt.text_hash)
        return Told(turn, tokenizer, history)

    return run


def generate(tokenizer, ids, params):
    """Return the ids that an engine would have generated, and the text that a client gets, as vLLM does it."""
    request = EngineCoreRequest("r", [1], None, params, None, 0.0, None, None, None)
    detokenizer = IncrementalDetokenizer.from_new_request(tokenizer, request)
    for i, token_id in enumerate(ids):
        if detokenizer.update([token_id], token_id == EOS_ID):
            ids = ids[: i + 1]
            break
    return ids, detokenizer.get_next_output_text(finished=True, delta=False)


def verify_continues(told, prompt):
    """Verify that a prompt begins with D's own ids, and that what follows them is the template's text."""
    own = told.history.token_ids
    assert prompt.exact
    assert prompt.token_ids[: len(own)] == own
    # With the model's own text in its place, the prompt is the template's text.
    decoded = told.tokenizer.decode(prompt.token_ids.tolist())
    *asked, reply = told.history.messages
    start = told.tokenizer.decode(text_of(told.turn, asked).token_ids.tolist())
    assert decoded.startswith(start)
    probe = [*asked, {**reply, "content": "PROBE"}, {"role": "user", "content": "Go on."}]
    tail = told.tokenizer.decode(text_of(told.turn, probe).token_ids.tolist()).rpartition("PROBE")[2]
    assert decoded.endswith(tail)


def verify_rendered_afresh(told, prompt, delta="Go on.", **fields):
    """Verify that a prompt is what the template says for the whole history, from the first token on."""
    assert not prompt.exact
    whole = [*told.history.messages, {"role": "user", "content": delta}]
    assert prompt.token_ids == render(told.turn, empty(), whole, **fields).token_ids


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("name", APPENDING)
def test_a_template_that_appends_continues_exactly(tell, name, text):
    """D's ids stay as they are, and only what comes after them is tokenized."""
    told = tell(name, text)
    verify_continues(told, told.next_prompt())


@pytest.mark.parametrize("name", sorted(TEMPLATES))
def test_the_check_at_start_tells_which_templates_append(make_turn, name):
    """A plain conversation shows whether sessions of this model continue exactly; reasoning may still be stripped."""
    assert asyncio.run(make_turn(name).appends()) == (name in {*APPENDING, "thinking"})


@pytest.mark.parametrize("name", ["counting", "endless"])
def test_a_template_that_does_not_append_is_rendered_afresh(tell, name):
    """Where the history is rewritten, or a reply's end cannot be told, the whole prompt comes from the template."""
    told = tell(name, "Hello there.")
    verify_rendered_afresh(told, told.next_prompt())


@pytest.mark.parametrize("name", ["thinking", "forgetful"])
def test_reasoning_that_the_template_strips_leaves_the_prompt(tell, name):
    """Turn 1 thinks, turn 2 must not contain it; the common prefix ends where the reasoning began."""
    told = tell(name, "<think>\nhm, hm\n</think>\n\nHello." if name == "thinking" else "hm\n</think>\n\nHello.")
    prompt = told.next_prompt()
    verify_rendered_afresh(told, prompt)
    assert "hm" not in told.tokenizer.decode(prompt.token_ids.tolist())
    assert prompt.token_ids != told.history.token_ids[: len(prompt.token_ids)]


@pytest.mark.parametrize("said", ["Hello.", ""])
def test_what_the_prompt_added_and_the_history_lacks_leaves_the_prompt(tell, said):
    """A template that opens the reasoning in the prompt alone is rendered afresh, also where nothing was thought."""
    told = tell("forgetful", said)
    verify_rendered_afresh(told, told.next_prompt())


def test_reasoning_goes_on_in_a_tool_loop(tell):
    """Between a tool call and its result the template keeps the reasoning, so D's ids are continued."""
    told = tell("thinking", "<think>\nhm\n</think>\n\nLook.")
    prompt = render(told.turn, told.history, [{"role": "tool", "content": "42"}])
    assert prompt.exact
    assert prompt.token_ids[: len(told.history.token_ids)] == told.history.token_ids


def test_a_thinking_template_without_thoughts_continues_exactly(tell):
    """What there is not cannot be stripped."""
    told = tell("thinking", "Hello.")
    verify_continues(told, told.next_prompt())


def test_reasoning_that_a_parser_took_out_is_left_out(tell):
    """A template that knows no reasoning does not continue ids that contain some."""
    told = tell("chatml", "<think>hm</think>Hello.", message={"content": "Hello.", "reasoning": "hm"})
    verify_rendered_afresh(told, told.next_prompt())


def test_a_tool_call_stays_as_the_model_wrote_it(tell):
    """The template writes a call's JSON in its own way; D's ids have the model's."""
    said = '<tool_call>\n{"name":   "weather", "arguments": {"at":"Rome"}}\n</tool_call>'
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"at":"Rome"}'}}
    told = tell("shipped", said, tools=[WEATHER], message={"content": None, "tool_calls": [call]})
    result = [{"role": "tool", "tool_call_id": "c1", "content": "sunny"}]
    prompt = render(told.turn, told.history, result, tools=[WEATHER])
    assert prompt.exact
    assert '"name":   "weather"' in told.tokenizer.decode(prompt.token_ids.tolist())


@pytest.mark.parametrize("name", ["shipped", "options"])
def test_new_tools_are_in_the_prompt(tell, name):
    """Regression: the old prompt was continued, and the model never saw the tools that came with a later turn."""
    told = tell(name, "Hello.")
    prompt = told.next_prompt(tools=[WEATHER])
    verify_rendered_afresh(told, prompt, tools=[WEATHER])
    assert "weather" in told.tokenizer.decode(prompt.token_ids.tolist())
    same = tell(name, "Hello.", tools=[WEATHER]).next_prompt(tools=[WEATHER])
    assert same.exact


def test_new_template_arguments_are_in_the_prompt(tell):
    """As with tools: what the template would say now counts."""
    told = tell("options", "Hello.", chat_template_kwargs={"mood": "bright"})
    assert told.next_prompt(chat_template_kwargs={"mood": "bright"}).exact
    prompt = told.next_prompt(chat_template_kwargs={"mood": "dark"})
    verify_rendered_afresh(told, prompt, chat_template_kwargs={"mood": "dark"})


@pytest.mark.parametrize("name", APPENDING)
def test_an_empty_reply_keeps_the_header_of_the_assistant(tell, name):
    """Regression: a prompt's own last token was dropped where it is a special one and the reply was empty."""
    told = tell(name, "\nmore", ends=False, stop=["\n"])
    assert told.history.messages[-1]["content"] == ""
    verify_continues(told, told.next_prompt())


def test_an_option_that_writes_before_the_reply_is_not_left_out(tell):
    """The history begins with the last prompt, but this turn's options write something between it and the reply."""
    told = tell("opening", "Hello")
    options = {"chat_template_kwargs": {"opening": "[formal] "}}
    prompt = told.next_prompt(**options)
    verify_rendered_afresh(told, prompt, **options)
    assert "[formal] Hello" in told.tokenizer.decode(prompt.token_ids)


def test_what_ends_a_reply_is_found_for_each_option(tell):
    """What the template writes after a reply is remembered for the options that it was found with, and no others."""
    for sign in (" -- A.", " -- B.", " -- A."):
        options = {"chat_template_kwargs": {"sign": sign}}
        told = tell("signing", "Sunny", **options)
        prompt = told.next_prompt(**options)
        verify_continues(told, prompt)
        assert told.tokenizer.decode(prompt.token_ids).count(f"Sunny{sign}<|im_end|>") == 1


def test_an_unknown_earlier_prompt_is_rendered_afresh(tell):
    """A session whose last prompt's text is not known continues from the template."""
    told = tell("chatml", "Hello.")
    told.history = History(told.history.messages, told.history.token_ids, "", "")
    verify_rendered_afresh(told, told.next_prompt())


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(said=st.text(max_size=40), name=st.sampled_from(sorted(TEMPLATES)), ends=st.booleans())
@example(said="<|im_end|>", name="bare", ends=False)
@example(said="bidikv-mark-5f1c<|im_end|>\n", name="chatml", ends=True)
def test_any_text_continues_rightly(tell, said, name, ends):
    """For any reply, the prompt is D's ids and the template's rest, or the template's text alone."""
    told = tell(name, said, ends=ends)
    prompt = told.next_prompt()
    if prompt.exact:
        verify_continues(told, prompt)
    else:
        verify_rendered_afresh(told, prompt)


# Ordinary tokens of a byte-level vocabulary: parts of characters, and runs that encoding would never choose.
ODD_IDS = st.lists(st.integers(3, 49151), min_size=0, max_size=12)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(ids=ODD_IDS, ends=st.booleans())
@example(ids=[198, 198], ends=True)  # two newlines that encoding would make one token of
def test_any_ids_are_kept_as_generated(tell, ids, ends):
    """Ids whose text encodes to others, or to none, stay what they are in D's cache."""
    told = tell("chatml", ids, ends=ends)
    prompt = told.next_prompt()
    assert prompt.exact
    verify_continues(told, prompt)


# ---------------------------------------------------------------- reply_ids


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    ids=ODD_IDS, stop=st.sampled_from([(), ("e",), (" th",), ("\n",), (".",)]), skip=st.booleans(), ends=st.booleans()
)
def test_kept_ids_and_pending_text_are_the_clients_text(make_turn, renderer, ids, stop, skip, ends):
    """Whatever cut a reply short, kept ids and pending text add up to what the client got, special tokens apart."""
    tokenizer = renderer.get_tokenizer()
    params = SamplingParams(stop=list(stop), skip_special_tokens=skip)
    generated, text = generate(tokenizer, [*ids, EOS_ID] if ends else ids, params)
    num_kept, pending = make_turn("chatml").reply_ids(generated, text, skip_special_tokens=skip)
    assert tokenizer.decode(generated[:num_kept], skip_special_tokens=skip) + pending == text
    assert num_kept <= len(generated)
    assert not num_kept or generated[num_kept - 1] not in tokenizer.all_special_ids


def reply_of(make_turn, renderer, text, *, stop=(), cut=None, ends=False, skip=True):
    """Let the model say a text; return what was kept of it, as text, and the pending text."""
    tokenizer = renderer.get_tokenizer()
    ids = tokenizer.encode(text, add_special_tokens=False)[:cut]
    ids = [*ids, EOS_ID] if ends else ids
    generated, got = generate(tokenizer, ids, SamplingParams(stop=list(stop), skip_special_tokens=skip))
    num_kept, pending = make_turn("chatml").reply_ids(generated, got, skip_special_tokens=skip)
    return tokenizer.decode(generated[:num_kept]), pending


def test_a_stop_string_that_ends_inside_a_token(make_turn, renderer):
    """The token that the stop string cuts is not kept; what the client got of it is pending."""
    assert reply_of(make_turn, renderer, "one two three", stop=["hre"]) == ("one two", " t")


def test_a_stop_string_between_tokens(make_turn, renderer):
    """Nothing is pending where a token ends with the text."""
    assert reply_of(make_turn, renderer, "one two three", stop=[" three"]) == ("one two", "")


def test_a_character_that_is_not_complete_is_dropped(make_turn, renderer):
    """A reply that its length ended inside a character keeps the tokens before it."""
    num_tokens = len(renderer.get_tokenizer().encode(f"Hello{EMOJI}", add_special_tokens=False))
    assert num_tokens > 2
    assert reply_of(make_turn, renderer, f"Hello{EMOJI}", cut=num_tokens - 1) == ("Hello", "")


def test_characters_of_several_tokens_are_kept_before_a_stop_string(make_turn, renderer):
    """Regression: the search stopped inside a character and gave nearly all of such a reply's ids away."""
    text = EMOJI * 11
    kept, pending = reply_of(make_turn, renderer, f"{text}stop now", stop=["stop"])
    assert (kept, pending) == (text, "")


@pytest.mark.parametrize("skip", [True, False])
def test_the_models_own_end_of_turn_is_not_kept(make_turn, renderer, skip):
    """The template writes one; the model's was never fed back."""
    assert reply_of(make_turn, renderer, "Hello", ends=True, skip=skip) == ("Hello", "")


def test_special_tokens_that_the_client_sees_are_pending(make_turn, renderer):
    """Shown special tokens at the end are part of the text."""
    assert reply_of(make_turn, renderer, "Hello<|im_start|>", skip=False) == ("Hello", "<|im_start|>")


# ---------------------------------------------------------------- refusals


def test_a_prompt_that_does_not_fit_is_refused(make_turn):
    """Prompt and asked tokens together are more than the model's context."""
    with pytest.raises(Refused, match=f"context is {MAX_MODEL_LEN}") as refused:
        render(make_turn("chatml"), empty(), [{"role": "user", "content": "word " * MAX_MODEL_LEN}])
    assert (refused.value.info.code, refused.value.info.param) == ("context_length_exceeded", "messages")
    with pytest.raises(Refused, match="2040 more are asked for"):
        render(make_turn("chatml"), empty(), [{"role": "user", "content": "Hi"}], max_completion_tokens=2040)


@pytest.mark.parametrize("fields", [{"chat_template": "{{ 1/0 }}"}, {"chat_template_kwargs": {"chat_template": "x"}}])
def test_a_template_of_the_callers_is_refused_and_not_run(make_turn, fields):
    """Regression: a template in the body was run before vLLM refused it."""
    with pytest.raises(Refused, match="untrusted chat template"):
        render(make_turn("chatml"), empty(), [{"role": "user", "content": "Hi"}], **fields)


def test_a_template_that_fails_is_a_refusal(vllm_config, renderer):
    """What a template says about bad messages reaches the caller, as a 400."""
    template = "{{ raise_exception('roles must alternate') }}"
    turn = TurnRenderer(SimpleNamespace(online_renderer=make_online_renderer(vllm_config, renderer, template)))
    with pytest.raises(Refused, match="roles must alternate") as refused:
        render(turn, empty(), [{"role": "user", "content": "Hi"}])
    assert refused.value.info.code == "invalid_request"
