"""A chat model on the fake server."""

import pytest

from bidikv_sdk.integrations.langchain import ChatBidiKV


@pytest.fixture
def model(url: str) -> ChatBidiKV:
    """A model on it."""
    return ChatBidiKV(base_url=url, model="fake", max_retries=0)
