"""What computing and fetching cost, in seconds: constant priors, until measured rates take their place.

Pure; imports nothing of ours.
"""

from dataclasses import dataclass
from typing import Protocol


class Rates(Protocol):
    """The cost of the two ways in which a prompt's KV comes to be."""

    def prefill_s(self, num_tokens: int, *, num_cached: int = 0) -> float:
        """Return how long computing `num_tokens` takes behind `num_cached` tokens that are there already.

        Never cheaper per token the more lie before it.
        """
        ...

    def fetch_s(self, num_bytes: int) -> float:
        """Return how long reading so much KV from another engine takes."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ConstantRates:
    """Rates that do not learn.

    The defaults are of an 8 B model on one data-center GPU with a fast network. Comparing leases needs their shape
    only; choosing between computing and fetching needs measured ones.
    """

    prefill_tokens_per_s: float = 35_000.0
    """Of a short prompt, where attention costs nothing yet."""
    attention_tokens: float = 53_000.0
    """Length at which attention costs as much as the weights: it makes the cost quadratic."""
    fetch_bytes_per_s: float = 22e9
    fetch_fixed_s: float = 0.020
    """What every fetch costs, however small."""

    def prefill_s(self, num_tokens: int, *, num_cached: int = 0) -> float:
        """Return how long computing `num_tokens` takes behind `num_cached` tokens that are there already."""
        # Token i attends to i tokens: the sum over those from num_cached on.
        attention = num_tokens * (2 * num_cached + num_tokens) / self.attention_tokens
        return (num_tokens + attention) / self.prefill_tokens_per_s

    def fetch_s(self, num_bytes: int) -> float:
        """Return how long reading so much KV from another engine takes."""
        return self.fetch_fixed_s + num_bytes / self.fetch_bytes_per_s
