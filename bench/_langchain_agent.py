"""One arm of `langchain_ttft`: the demo's agent as LangChain runs it. Runs in LangChain's environment.

    python -m bench._langchain_agent ARM

Prints one line of JSON for each turn. The arms differ in the model that they make, and in nothing else.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

from langchain.agents import create_agent
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessageChunk, HumanMessage
from langchain_openai import ChatOpenAI
from langgraph.checkpoint.memory import InMemorySaver
from pydantic import SecretStr

from bidikv_sdk.integrations.langchain import ChatBidiKV
from examples.agents.coding_agent import GUIDELINES, SCRIPT, run_tool

URL = os.environ["BIDIKV_BASE_URL"]
GREEDY: dict[str, Any] = {"model": os.environ["BIDIKV_MODEL"], "temperature": 0, "max_tokens": 32}
MIN_TOKENS = {"min_tokens": 32}
# D passes a prompt to P only within a session, and the way of this one is what stock P and D do: compute all of it.
STOCK_PD = {**MIN_TOKENS, "session_id": "stock", "bidikv": {"route": "recompute"}}
NO_KEY = SecretStr("none")

ARMS: dict[str, Callable[[], BaseChatModel]] = {
    "d-alone": lambda: ChatOpenAI(base_url=URL, api_key=NO_KEY, stream_usage=True, extra_body=MIN_TOKENS, **GREEDY),
    "recomputed": lambda: ChatOpenAI(base_url=URL, api_key=NO_KEY, stream_usage=True, extra_body=STOCK_PD, **GREEDY),
    "bidikv": lambda: ChatBidiKV(base_url=URL, api_key=NO_KEY, route="fetch", extra_body=MIN_TOKENS, **GREEDY),
}


def turn(agent: Any, text: str) -> dict[str, Any]:
    """Run one turn, and return what it said, how long a prompt it had, and when the first text came."""
    said, prompt_tokens, ttft_s = "", 0, 0.0
    started_s = time.perf_counter()
    config = {"configurable": {"thread_id": "shelf"}}
    for chunk, _ in agent.stream({"messages": [HumanMessage(text)]}, config, stream_mode="messages"):
        if isinstance(chunk, AIMessageChunk):
            if chunk.text and not said:
                ttft_s = time.perf_counter() - started_s
            said += chunk.text
            prompt_tokens += (chunk.usage_metadata or {"input_tokens": 0})["input_tokens"]
    return {"ttft_s": ttft_s, "prompt_tokens": prompt_tokens, "text": said}


def main(arm: str) -> None:
    """Work through the task."""
    agent = create_agent(ARMS[arm](), [], system_prompt=GUIDELINES, checkpointer=InMemorySaver())
    print(json.dumps(turn(agent, SCRIPT["task"])), flush=True)
    for command, question in SCRIPT["steps"]:
        print(json.dumps(turn(agent, f"{run_tool(command)}\n\n{question}")), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
