"""Chat templates of the families that agents run on: what each does to its history, with this tokenizer's tokens.

Each takes `enable_thinking` and `tools`, as the originals do, and rewrites what the original rewrites: that is all that
they have in common with them.
"""

_TOOLS = "{% if tools %}Tools:{% for t in tools %} {{ t.function.name }}{% endfor %}\n{% endif %}"
_LAST_USER = (
    "{% set ns = namespace(last=-1) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
)
_SAID = "{% set said = (m.content or '').split('</think>')[-1].lstrip('\\n') %}"

# Reasoning stays behind the last user's message, and goes from before it. Without thinking the prompt has an empty
# thought, which the history never has.
QWEN3 = (
    f"<|im_start|>system\n{_TOOLS}<|im_end|>\n{_LAST_USER}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    f"{{% if m.role == 'assistant' and loop.index0 < ns.last %}}{_SAID}{{{{ said }}}}"
    "{% else %}{{ m.content or '' }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
# The prompt opens the thought, or closes it where there is none; the history has it closed, and never its text.
DEEPSEEK = (
    f"{_TOOLS}{{% for m in messages %}}{{% if m.role == 'assistant' %}}{_SAID}"
    "<|im_start|>assistant\n</think>{{ said }}<|im_end|>"
    "{% else %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking %}<think>{% else %}</think>{% endif %}{% endif %}"
)
# Nothing ends a reply but the next header; thoughts of before the last user's message become empty ones.
GLM = (
    f"{_TOOLS}{_LAST_USER}{{% for m in messages %}}<|im_start|>{{{{ m.role }}}}\n"
    f"{{% if m.role == 'assistant' and loop.index0 < ns.last %}}{_SAID}<think></think>{{{{ said }}}}"
    "{% elif m.role == 'assistant' and '</think>' not in m.content %}<think></think>{{ m.content }}"
    "{% else %}{{ m.content or '' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if not enable_thinking %}<think></think>{% endif %}{% endif %}"
)
# The model names the channel that it writes to; of an earlier reply only the final one is kept.
GPT_OSS = (
    f"{_TOOLS}{_LAST_USER}{{% for m in messages %}}<|im_start|>{{{{ m.role }}}}"
    "{% if m.role == 'assistant' and loop.index0 < ns.last %} final:{{ (m.content or '').split(' final:')[-1] }}"
    "{% else %}{{ m.content or '' }}{% endif %}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant{% endif %}"
)
# No thoughts; tools stand in the first message, and blanks around a text go.
LLAMA3 = (
    f"<|endoftext|><|im_start|>system<|im_start|>\n\n{_TOOLS}<|im_end|>"
    "{% for m in messages %}<|im_start|>{{ m.role }}<|im_start|>\n\n"
    "{{ (m.content or '') | trim }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant<|im_start|>\n\n{% endif %}"
)

THOUGHT = "hm, hm, hm\n"
# Of each family: its template, what a model of it says with and without thinking, and whether a user's message behind
# that leaves all that was held in place.
FAMILIES = {
    "qwen3, thinking": (QWEN3, True, f"<think>\n{THOUGHT}</think>\n\nHello.", False),
    "qwen3": (QWEN3, False, "Hello.", False),
    "deepseek, thinking": (DEEPSEEK, True, f"{THOUGHT}</think>Hello.", False),
    "deepseek": (DEEPSEEK, False, "Hello.", True),
    "glm, thinking": (GLM, True, f"<think>{THOUGHT}</think>Hello.", False),
    "glm": (GLM, False, "Hello.", True),
    "gpt-oss, thinking": (GPT_OSS, True, f" analysis:{THOUGHT} final:Hello.", False),
    "gpt-oss": (GPT_OSS, False, " final:Hello.", True),
    "llama3": (LLAMA3, False, "Hello.", True),
}
# Those that leave it in place behind a tool's result, between two calls of a loop.
KEPT_IN_A_TOOL_LOOP = {"qwen3, thinking", "deepseek", "glm, thinking", "glm", "gpt-oss, thinking", "gpt-oss", "llama3"}
