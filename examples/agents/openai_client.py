"""The stock OpenAI client, with its whole history in every request, on a session.

    BIDIKV_BASE_URL=http://127.0.0.1:8200/v1 python examples/agents/openai_client.py

Only the HTTP client below it knows of bidikv: inside `current_session` it names the session in every completion, and D
finds what it holds already. Take the block away, and everything is as it was.
"""

import os
from typing import Any

from openai import OpenAI

from bidikv_sdk import CurrentSession
from bidikv_sdk.integrations.openai import current_session, http_client

QUESTIONS = ("Name a harbour in Norway.", "Which fjord is it in?", "And which one is longer than that?")


def ask(client: OpenAI, session: CurrentSession, messages: list[Any]) -> str:
    """Ask with the whole history, as ever, and say what became of it."""
    options: dict[str, Any] = {"model": os.environ.get("BIDIKV_MODEL", "smollm2"), "temperature": 0, "max_tokens": 48}
    reply = client.chat.completions.create(messages=messages, **options)
    messages.append(reply.choices[0].message)
    if session.cache is not None:  # None: it was served without the session
        cached, prompt = session.cache.fetched_tokens + session.cache.reused_tokens, session.cache.prompt_tokens
        print(f"-- {session.cache.outcome}: {cached} of {prompt} tokens were there already")
    return reply.choices[0].message.content or ""


def run(client: OpenAI) -> None:
    """Have a conversation."""
    messages: list[Any] = [{"role": "system", "content": "You know Norway. Answer in one sentence."}]
    with current_session(on_exit="end") as session:
        for question in QUESTIONS:
            messages.append({"role": "user", "content": question})
            print(ask(client, session, messages))
            with session.hold():  # a person thinks
                pass


if __name__ == "__main__":
    with OpenAI(base_url=os.environ["BIDIKV_BASE_URL"], api_key="none", http_client=http_client()) as client:
        run(client)
