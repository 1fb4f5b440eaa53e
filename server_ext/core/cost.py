"""What each way of a turn costs, up to its first token: the words of a choice, and its arithmetic on rates.

For a prompt of N tokens of which D's lease holds m and P's own cache may hold h there are three ways:

- `local`: D appends N - m tokens. Nothing travels, but streams on D wait meanwhile.
- `fetch`: P reads m - h tokens from D, computes N - m, and D reads those back.
- `prefill`: P computes N - h tokens, and D reads the N - m that it lacks.

To each comes the wait for what was sent the same way a moment ago. `recompute`, all of it on P, is never the cheapest;
it is the yardstick. `cost_model` chooses. Pure; imports `bidikv_sdk.wire`, and `rates` and `records` for
their types.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Literal, Protocol, TypeAlias

from bidikv_sdk.wire import ChosenBy

if TYPE_CHECKING:
    from .rates import LearnedRates
    from .records import Key

Way: TypeAlias = Literal["local", "fetch", "prefill", "recompute"]
WAYS: Final[tuple[Way, ...]] = ("local", "fetch", "prefill")
"""That can be chosen."""

ChoiceReason: TypeAlias = ChosenBy | Literal["forced"]


# What follows is made at every turn, and freezing takes three times as long: nobody changes any of it.


@dataclass(slots=True, kw_only=True)
class Start:
    """A turn that begins. Tokens are of its prompt."""

    key: "Key"
    """Its session."""
    prompt_tokens: int
    matched_tokens: int
    """In D's lease."""
    diverged_at: int | None = None
    """Index of the first one that is not as it was; None where all is."""
    num_running: int = 0
    """Requests that generate on D."""
    pairs: tuple[str, ...] = ("",)
    """The Ps in the order in which they are asked; none: all goes to D."""


@dataclass(slots=True, kw_only=True)
class Situation:
    """What is known of a turn when its way is chosen. Tokens are of its prompt, times in seconds."""

    prompt_tokens: int
    matched_tokens: int = 0
    """In D's lease; they are in D's own prefix cache too."""
    cached_tokens: int = 0
    """That P's own cache holds, unless it has evicted them."""
    cached_share: float = 0.0
    """The chance that it has not."""
    num_running: int = 0
    """Requests that generate on D."""
    decode_wait_s: float = 0.0
    """Until D has computed what was sent there before."""
    prefill_wait_s: float = 0.0
    """Until P has."""
    pair: str = ""
    """Which P."""

    held_tokens: int = field(init=False)
    """What need not be computed where D's lease can be used; one token always is."""
    new_tokens: int = field(init=False)
    """All others."""

    def __post_init__(self) -> None:
        self.held_tokens = min(self.matched_tokens, self.prompt_tokens - 1)
        self.new_tokens = self.prompt_tokens - self.held_tokens


@dataclass(slots=True)
class Choice:
    """The way of one turn, and why."""

    way: Way
    estimates_s: Mapping[Way, float]
    """Expected seconds from the begin to the first token, of each way that is possible."""
    reason: ChoiceReason
    """As in `bidikv_sdk.wire`; or `forced`, by the caller or a setting."""


@dataclass(slots=True, kw_only=True)
class Observed:
    """What one turn has shown. Times in seconds; None where that did not happen or cannot be told apart."""

    prompt_tokens: int
    reused_tokens: int
    fetched_tokens: int
    prefill_s: float | None = None
    """From the call to P to its answer; None where P had no part."""
    fetch_s: float | None = None
    handover_s: float | None = None
    """From P's answer (without P: from the begin) to the first token."""
    pair: str | None = None
    """The P that answered; None where none did."""
    failed_pairs: tuple[str, ...] = ()
    """The Ps that were asked and did not answer."""
    is_read_failed: bool = False
    """P answered, but its read failed or was late, so it computed instead."""


def estimate_s(way: Way, situation: Situation, rates: "LearnedRates", *, token_bytes: float) -> float:
    """Return the expected seconds from a turn's begin to its first token on one way.

    Args:
        way: the way.
        situation: of the turn.
        rates: as they are believed now.
        token_bytes: KV bytes of one token.
    """
    if way == "local":
        return situation.decode_wait_s + rates.append_s(situation.new_tokens, num_cached=situation.held_tokens)
    # P's part is expected over what its cache may hold.
    on_prefill_s = _found_s(0, way, situation, rates, token_bytes)
    num_cached, share = situation.cached_tokens, situation.cached_share
    if num_cached > 0 and share and way != "recompute":
        found_s = _found_s(min(num_cached, situation.prompt_tokens - 1), way, situation, rates, token_bytes)
        on_prefill_s = share * found_s + (1 - share) * on_prefill_s
    num_read_back = situation.prompt_tokens if way == "recompute" else situation.new_tokens
    handover_s = rates.handover_s(round(num_read_back * token_bytes), pair=situation.pair)
    return situation.prefill_wait_s + on_prefill_s + handover_s


def _found_s(num_found: int, way: Way, situation: Situation, rates: "LearnedRates", token_bytes: float) -> float:
    """Return the expected seconds of P's part where its cache holds so many tokens."""
    num_before = num_found
    if way == "fetch" and situation.held_tokens > num_found:
        num_before = situation.held_tokens
    compute_s = rates.prefill_s(situation.prompt_tokens - num_before, num_cached=num_before)
    if num_before == num_found:
        return compute_s
    return compute_s + rates.fetch_s(round((num_before - num_found) * token_bytes), pair=situation.pair)


class FloorRates(Protocol):
    """What the floor of a turn is made of; all in seconds."""

    @property
    def decode_step_s(self) -> float:
        """Of one step that generates."""
        ...

    def prefill_s(self, num_tokens: int, *, num_cached: int = 0) -> float:
        """Return how long computing `num_tokens` takes behind `num_cached` that are there already."""
        ...

    def fetch_s(self, num_bytes: int, *, pair: str = "") -> float:
        """Return how long P takes to read so many bytes from D."""
        ...

    def handover_s(self, num_bytes: int, *, pair: str = "") -> float:
        """Return how long it takes from P's answer to the first token, of which D reads so many bytes from P."""
        ...


def floor_s(
    rates: FloorRates,
    *,
    computed_tokens: int,
    cached_tokens: int,
    fetched_bytes: int,
    handover_bytes: int,
    pair: str = "",
) -> float:
    """Return what a turn that goes over P takes at the least, in seconds, by measured rates.

    It is the delta's computation, all bytes over the link, one decode step, and the fixed costs of a prefill and of
    each read that takes place; no rendering, no control call, no wait.

    Args:
        rates: measured.
        computed_tokens: of the prompt, computed on P.
        cached_tokens: that lie before them.
        fetched_bytes: from D to P.
        handover_bytes: from P to D.
        pair: which P.
    """
    compute_s = rates.prefill_s(computed_tokens, num_cached=cached_tokens)
    fetch_s = rates.fetch_s(fetched_bytes, pair=pair) if fetched_bytes else 0.0
    # The fixed part of a hand-over has D's first step in it.
    return compute_s + fetch_s + max(rates.handover_s(handover_bytes, pair=pair), rates.decode_step_s)
