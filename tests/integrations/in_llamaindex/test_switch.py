"""The pairs of `examples/frameworks` of this environment: without bidikv, and with it."""

from collections.abc import Callable

import pytest


@pytest.mark.parametrize("framework", ["llamaindex"])
def test_switching_on(framework: str, verify_switch: Callable[..., None]) -> None:
    """With bidikv the agent does what it did without, and each of its calls belongs to its session."""
    verify_switch(framework)
