"""LangChain's integration suite for chat models, on a real server that `BIDIKV_BASE_URL` names.

`tests/engine/test_frameworks.py` runs it in the environment of LangChain. The model is a random one: it can answer, but
call no tool and keep to no schema by itself; the fake server has those tests.
"""

import os
from collections.abc import Iterator
from typing import Any

import pytest
from langchain_core.language_models import BaseChatModel
from langchain_tests.integration_tests import ChatModelIntegrationTests

from bidikv_sdk import current_session
from bidikv_sdk.integrations.langchain import ChatBidiKV


class TestChatBidiKV(ChatModelIntegrationTests):
    """What a small model can do."""

    @pytest.fixture(autouse=True)
    def _in_a_session(self) -> Iterator[None]:
        with current_session(on_exit="end"):
            yield

    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        """What is tested."""
        return ChatBidiKV

    @property
    def chat_model_params(self) -> dict[str, Any]:
        """What it is made with."""
        return {"model": os.environ["BIDIKV_MODEL"], "temperature": 0, "max_tokens": 16}

    @property
    def model_override_value(self) -> str:
        """The server has one model."""
        return os.environ["BIDIKV_MODEL"]

    @property
    def has_tool_calling(self) -> bool:
        """A random model cannot."""
        return False

    @property
    def has_structured_output(self) -> bool:
        """A random model cannot."""
        return False
