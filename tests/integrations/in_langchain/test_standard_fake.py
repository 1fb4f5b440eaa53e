"""LangChain's integration suite for chat models, on the fake server and within sessions.

What a model would have to understand is scripted, for the tests that look at it: how it reaches LangChain is not.
"""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from langchain_core.language_models import BaseChatModel
from langchain_tests.integration_tests import ChatModelIntegrationTests

from bidikv_sdk import current_session
from bidikv_sdk.integrations.langchain import ChatBidiKV
from bidikv_sdk.testing import FakeServer

WORDS = {"setup": "Why do cats sit on keyboards?", "punchline": "To watch the mouse."}
JOKE = {"text": json.dumps(WORDS)}


def call(name: str, **arguments: Any) -> dict[str, Any]:
    """Return the script of an answer that calls a tool."""
    function = {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)}
    return {"tool_calls": [{"id": "call-1", "type": "function", "function": function}]}


SCRIPTS = {
    "test_tool_calling": [call("magic_function", input=3)] * 2,
    "test_tool_calling_async": [call("magic_function", input=3)] * 2,
    "test_bind_runnables_as_tools": [call("greeting_generator", answer_style="pirate")],
    "test_tool_choice": [call("get_weather", location="Oslo"), call("magic_function", input=1)],
    "test_tool_calling_with_no_arguments": [call("magic_function_no_args")] * 2,
    "test_structured_output": [JOKE] * 2,
    "test_structured_output_async": [JOKE] * 2,
    # For a model of Pydantic 1 LangChain takes a tool in the place of a schema.
    "test_structured_output_pydantic_2_v1": [*[call("Joke", **WORDS)] * 2, *[JOKE] * 2],
    "test_structured_output_optional_param": [JOKE] * 4,
    "test_json_mode": [JOKE] * 4,
    "test_agent_loop": [call("get_weather", location="San Francisco, CA"), {"text": "Sunny."}],
    "test_unicode_tool_call_integration": [
        call("unicode_customer", customer_name="你好啊集团", description="A company"),
        call("unicode_customer", customer_name="こんにちは株式会社", description="A company"),
    ],
}


class TestChatBidiKV(ChatModelIntegrationTests):
    """All that a text model can be asked."""

    @pytest.fixture(autouse=True)
    def _served(self, server: FakeServer, url: str, request: pytest.FixtureRequest) -> Iterator[None]:
        self.url = url
        script = SCRIPTS.get(request.node.originalname, [])
        for answer in script:
            server.reply(**answer)
        with current_session():
            yield
        chats = [request for request in server.requests if request.verb == "chat"]
        # A script that is longer than its test would hide what the test asked for.
        assert not script or len(chats) == len(script)
        assert all(chat.session_id for chat in chats)

    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        """What is tested."""
        return ChatBidiKV

    @property
    def chat_model_params(self) -> dict[str, Any]:
        """What it is made with."""
        return {"base_url": self.url, "model": "fake"}

    @property
    def model_override_value(self) -> str:
        """The server has one model."""
        return "fake"

    @property
    def supports_json_mode(self) -> bool:
        """As vLLM does."""
        return True
