"""LangChain's own unit suite for chat models."""

from typing import Any

from langchain_core.language_models import BaseChatModel
from langchain_tests.unit_tests import ChatModelUnitTests

from bidikv_sdk.integrations.langchain import ChatBidiKV

URL = "http://127.0.0.1:8200/v1"


class TestChatBidiKV(ChatModelUnitTests):
    """All of them."""

    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        """What is tested."""
        return ChatBidiKV

    @property
    def chat_model_params(self) -> dict[str, Any]:
        """What it is made with."""
        return {"base_url": URL, "model": "smollm2"}

    @property
    def init_from_env_params(self) -> tuple[dict[str, str], dict[str, Any], dict[str, Any]]:
        """What comes from the environment."""
        env = {"BIDIKV_BASE_URL": URL, "BIDIKV_API_KEY": "key-1"}
        return env, {"model": "smollm2"}, {"openai_api_base": URL, "openai_api_key": "key-1"}
