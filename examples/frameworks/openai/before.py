"""The stock OpenAI client, and a loop of one's own around it."""

import json
from typing import Any

from openai import OpenAI

from examples.frameworks.task import INSTRUCTIONS, MODEL, QUESTIONS, URL, look

PARAMETERS = {"type": "object", "properties": {"city": {"enum": ["Oslo", "Paris"]}}, "required": ["city"]}
TOOLS: Any = [{"type": "function", "function": {"name": "look", "parameters": PARAMETERS}}]


def answer(client: OpenAI, messages: list[Any]) -> str | None:
    """Let the model call tools until it answers."""
    while True:
        reply = client.chat.completions.create(model=MODEL, messages=messages, tools=TOOLS).choices[0].message
        messages.append(reply)
        for call in reply.tool_calls or ():
            seen = look(**json.loads(call.function.arguments))  # type: ignore[union-attr]
            messages.append({"role": "tool", "tool_call_id": call.id, "content": seen})
        if not reply.tool_calls:
            return reply.content


with OpenAI(base_url=URL, api_key="none") as client:
    messages: list[Any] = [{"role": "system", "content": INSTRUCTIONS}]
    for question in QUESTIONS:
        messages.append({"role": "user", "content": question})
        print(answer(client, messages))
