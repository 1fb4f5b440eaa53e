"""Chat templates in the manner of the well-known families, small, for this tokenizer's special tokens."""

# Append-only.
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Reasoning stays in the messages behind the last user's, and goes from all before it.
THINKING = (
    "{% set ns = namespace(last=-1) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.index0 < ns.last %}{{ (m.content or '').split('</think>')[-1].lstrip('\n') }}"
    "{% else %}{{ m.content or '' }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Opens the reasoning in the prompt and drops it from every message, also the last.
FORGETFUL = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ (m.content or '').split('</think>')[-1] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)
# Headers, and an end of turn that is not followed by a newline.
HEADERS = (
    "<|endoftext|>{% for m in messages %}<|im_start|>{{ m.role }}<|im_start|>\n\n{{ m.content or '' }}<|im_end|>"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant<|im_start|>\n\n{% endif %}"
)
# The first line changes with every message.
COUNTING = (
    "<|im_start|>system\n{{ messages | length }} messages<|im_end|>\n"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Nothing tells where a reply ends.
ENDLESS = (
    "{% for m in messages %}{% if m.role == 'user' %}\nUser: {{ m.content }}\nAssistant: "
    "{% else %}{{ m.content or '' }}{% endif %}{% endfor %}"
)
# Spaces around what was said are dropped.
TRIMMING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ (m.content or '') | trim }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# The prompt ends with a special token, as the model's reply may.
BARE = (
    "{% for m in messages %}{{ m.role }}<|im_start|>{{ m.content or '' }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}assistant<|im_start|>{% endif %}"
)
# Ends each reply as the caller asks.
SIGNING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}{{ sign if m.role == 'assistant' }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Begins each reply, told or asked for, as the caller asks.
OPENING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ opening if m.role == 'assistant' }}{{ m.content or '' }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{{ opening }}{% endif %}"
)
# Mentions the tools, and an option of the caller's.
OPTIONS = (
    "<|im_start|>system\n{{ mood or 'calm' }}{% for t in tools or [] %} {{ t.function.name }}{% endfor %}<|im_end|>\n"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
