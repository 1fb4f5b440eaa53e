"""What every part of the harness knows: sizes, and how to wait for something to happen."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

BLOCK_SIZE = 32
MAX_MODEL_LEN = 1536
# Of two layers with two heads.
BLOCK_BYTES = 32 * 1024
POOL_BLOCKS = 127
PREFILL_PATH = "/bidikv/prefill"
# Small, so that a test can meet P in the middle of a prefill.
PREFILL_STEP_TOKENS = 8
PREFILL_LEASE_S = 6

# A machine with two cores that does other things as well may take long; nothing here waits for time to pass.
DEADLINE_S = 60.0
_POLL_S = 0.02


def eventually(condition: Callable[[], Any], what: str, *, deadline_s: float = DEADLINE_S) -> Any:
    """Return the first true value of `condition`; fail, naming `what`, where none comes in time."""
    end_s = time.monotonic() + deadline_s
    while not (value := condition()):
        assert time.monotonic() < end_s, f"not within {deadline_s:g} s: {what}"
        time.sleep(_POLL_S)
    return value
