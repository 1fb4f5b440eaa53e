import itertools
import json
import stat
from pathlib import Path

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment

import server_ext.launch
from server_ext.launch.model import SMOLLM2, ensure_smollm2, publish, resolve_model, write_atomically
from server_ext.launch.tiny import ensure_tiny

TEMPLATE = Path(server_ext.launch.__file__).parent / "templates" / "smollm2_tools.jinja"
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
CALL = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Köln"}}}
CONVERSATION = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": None, "tool_calls": [CALL, CALL]},
    {"role": "tool", "tool_call_id": "1", "content": "sunny"},
    {"role": "assistant", "content": "It is sunny.", "tool_calls": None},
    {"role": "user", "content": "Thanks"},
]


def render(messages, *, prompt=False, tools=None):
    """The chat template's text, in the environment that chat servers use."""
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    template = environment.from_string(TEMPLATE.read_text("utf-8"))
    return template.render(messages=messages, tools=tools, add_generation_prompt=prompt)


def test_a_chat_without_tools_is_plain_chatml():
    """The text is what SmolLM2 was trained on, its default system prompt included."""
    assert render(CONVERSATION[:1], prompt=True) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )


def test_a_system_prompt_replaces_the_default_one():
    """There is exactly one system message."""
    text = render([{"role": "system", "content": "Be brief."}, *CONVERSATION[:1]])
    assert text == "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"


@pytest.mark.parametrize("tools", [None, TOOLS])
def test_the_template_only_appends(tools):
    """Each conversation's text is a prefix of its continuation's, the key property for reusing a cache."""
    texts = [render(CONVERSATION[:n], tools=tools) for n in range(1, len(CONVERSATION) + 1)]
    for shorter, longer in itertools.pairwise(texts):
        assert longer.startswith(shorter)
        assert longer != shorter


def test_the_generation_prompt_is_how_the_answer_begins():
    """The prompt for an answer is a prefix of the history that contains it."""
    assert render(CONVERSATION[:4], tools=TOOLS).startswith(render(CONVERSATION[:3], tools=TOOLS, prompt=True))


def test_tool_calls_are_written_as_the_parser_reads_them():
    """Content may be null, arguments an object or text; each call is one JSON object between its tags."""
    text = render(CONVERSATION, tools=TOOLS)
    assert '{"name": "weather", "parameters": {"type": "object"}}' in text
    call = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>'
    assert f"<|im_start|>assistant\n{call}\n{call}<|im_end|>\n" in text
    as_text = {"function": {"name": "weather", "arguments": '{"city": "Köln"}'}}
    assert call in render([{"role": "assistant", "content": "Let me see.", "tool_calls": [as_text]}])
    assert "<|im_start|>tool\n<tool_response>\nsunny\n</tool_response><|im_end|>\n" in text


def test_a_folder_appears_complete_or_not_at_all(tmp_path):
    """A build that fails leaves nothing behind, neither the folder nor scratch."""

    def fail(out):
        (out / "config.json").write_text("{}")
        msg = "disk full"
        raise RuntimeError(msg)

    with pytest.raises(RuntimeError, match="disk full"):
        publish(tmp_path / "model", fail)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_is_built_once(tmp_path):
    """The second call builds nothing, but puts back a chat template that is out of date."""
    folder = publish(tmp_path / "model", lambda out: (out / "config.json").write_text("{}"))
    (folder / "chat_template.jinja").write_text("old")
    publish(folder, lambda out: pytest.fail("built twice"))
    assert (folder / "chat_template.jinja").read_text("utf-8") == TEMPLATE.read_text("utf-8")
    assert sorted(path.name for path in folder.iterdir()) == ["chat_template.jinja", "config.json"]


def test_losing_the_race_to_build_is_no_error(tmp_path):
    """Two processes may build the same folder; the first one's stays."""

    def overtaken(out):
        (tmp_path / "model").mkdir()
        (tmp_path / "model" / "first").touch()

    assert (publish(tmp_path / "model", overtaken) / "first").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_write_that_fails_keeps_the_old_content(tmp_path):
    """Readers never see a part, and the mode holds."""
    path = tmp_path / "file"
    write_atomically(path, "old", mode=0o600)
    with pytest.raises(UnicodeEncodeError):
        write_atomically(path, "\udc80")
    assert path.read_text() == "old"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert list(tmp_path.iterdir()) == [path]


def test_other_models_are_taken_as_they_are():
    """Only the default model's name is special."""
    assert resolve_model("org/model") == "org/model"
    assert resolve_model("/some/folder") == "/some/folder"


@pytest.fixture(scope="module")
def generate():
    """A function that continues token ids greedily, with transformers."""
    import torch
    from transformers import AutoModelForCausalLM

    def run(folder, token_ids, count):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        ids = torch.tensor([token_ids])
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False)
        return out[0, len(token_ids) :].tolist()

    return run


@pytest.mark.filterwarnings("ignore")  # torch's and transformers' own, at import
def test_the_default_model_speaks(generate):
    """The converted SmolLM2 answers and ends its turn, and its tokenizer splits digits one by one."""
    from transformers import AutoTokenizer

    folder = ensure_smollm2()
    assert resolve_model(SMOLLM2) == str(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert len(tokenizer.encode("12345")) == 5
    assert tokenizer.decode(tokenizer.encode("naïve  code\n")) == "naïve  code\n"
    prompt = render([{"role": "user", "content": "What is the capital of France?"}], prompt=True)
    answer = generate(folder, tokenizer.encode(prompt), 30)
    assert "Paris" in tokenizer.decode(answer)
    assert answer[-1] == tokenizer.eos_token_id


@pytest.mark.filterwarnings("ignore")
def test_the_tiny_model_depends_on_its_whole_history(generate):
    """Its answers wander, and change from the first token on when one early token is another."""
    folder = ensure_tiny()
    history = [1000 + 37 * i % 4000 for i in range(300)]
    answer = generate(folder, history, 32)
    assert len(set(answer)) > 16
    edited = [*history[:100], 777, *history[101:]]
    assert generate(folder, edited, 32) != answer
