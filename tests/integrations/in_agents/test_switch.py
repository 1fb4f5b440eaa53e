"""The pairs of `examples/frameworks` of this environment: without bidikv, and with it."""

from collections.abc import Callable

import pytest


@pytest.mark.parametrize("framework", ["openai", "openai_agents", "pydantic_ai"])
def test_switching_on(framework: str, verify_switch: Callable[..., None]) -> None:
    """With bidikv the agent does what it did without, and each of its calls belongs to its session."""
    verify_switch(framework)


def test_switching_smolagents_on(verify_switch: Callable[..., None]) -> None:
    """As above; its agents answer by a tool, too."""
    verify_switch("smolagents", answer_tool="final_answer")
