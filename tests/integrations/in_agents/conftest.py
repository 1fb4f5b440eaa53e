"""A model of the Agents SDK on the fake server."""

from collections.abc import AsyncIterator

import pytest
from agents import OpenAIChatCompletionsModel, set_tracing_disabled
from openai import AsyncOpenAI

from bidikv_sdk.integrations.openai_agents import async_http_client


@pytest.fixture
def anyio_backend() -> str:
    """The Agents SDK's runs are asyncio's."""
    return "asyncio"


@pytest.fixture
async def model(url: str) -> AsyncIterator[OpenAIChatCompletionsModel]:
    """A model whose completions belong to the current session."""
    set_tracing_disabled(disabled=True)
    async with AsyncOpenAI(base_url=url, api_key="none", http_client=async_http_client(), max_retries=0) as client:
        yield OpenAIChatCompletionsModel("fake", openai_client=client)
