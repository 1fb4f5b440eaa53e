"""What every part of the harness knows: sizes, and how to wait for something to happen."""

from __future__ import annotations

import re
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


def total(scrape: str, name: str, **labels: str) -> float:
    """Return a metric, summed over all of its series that have these labels.

    Args:
        scrape: what an engine's `/metrics` said.
        name: of a sample; a histogram has `_count`, `_sum` and `_bucket`.
        labels: those that count.

    Raises:
        LookupError: there is no such series. A name that is not served must not read as a zero.
    """
    series = re.findall(rf"^{re.escape(name)}(?:{{([^}}]*)}})? (\S+)$", scrape, re.MULTILINE)
    wanted = {f'{label}="{value}"' for label, value in labels.items()}
    values = [float(value) for found, value in series if wanted <= set(found.split(","))]
    if not values:
        msg = f"no metric {name} with the labels {labels} is served"
        raise LookupError(msg)
    return sum(values)
