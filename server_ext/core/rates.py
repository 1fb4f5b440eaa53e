"""What computing and moving KV cost, in seconds: constant priors, and rates learned from real turns.

`LearnedRates` begins at the limit model's shape, and each observation moves it: `observe_prefill`, `observe_append`,
`observe_fetch` and `observe_handover` once a turn, `observe_step` once a step of the decode engine. Unobserved costs
borrow from their likes: appending and prefilling from each other (the same model), and so do a pair's hand-overs and
fetches (the same link). Pure; imports `linear_fit` only.
"""

from dataclasses import dataclass
from typing import Final, Protocol

from .linear_fit import LinearFit, Three


class Rates(Protocol):
    """The cost of the two ways in which a prompt's KV comes to be, for comparing leases."""

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


# What a call to an engine costs beyond its computation, on fast machines; and a step that generates.
_PREFILL_FIXED_S: Final = 0.010
_DECODE_STEP_S: Final = 0.020
# So many turns of one engine say little about the shape of its cost.
_FEW: Final = 4
# Of a new observation in a running mean; it counts as at most so many times what was expected.
_WEIGHT: Final = 0.1
_MAX_RATIO: Final = 3.0


class _Pair:
    """One prefill and this decode engine: what the link between them costs."""

    __slots__ = ("fetch", "handover", "has_fetched", "has_handed_over")

    def __init__(self, prior: ConstantRates) -> None:
        self.fetch = LinearFit(prior.fetch_fixed_s, 1 / prior.fetch_bytes_per_s)
        # D takes up the request and makes its first step behind the read.
        self.handover = LinearFit(prior.fetch_fixed_s + _DECODE_STEP_S, 1 / prior.fetch_bytes_per_s)
        self.has_fetched = self.has_handed_over = False


class _Computing:
    """What computing costs on one engine: the shape that both engines have shown, at this one's speed."""

    __slots__ = ("_first", "_priors", "fit")

    def __init__(self, priors: Three) -> None:
        self.fit = LinearFit(*priors)
        self._priors = priors
        self._first: list[tuple[float, int, int]] = []

    @property
    def is_observed(self) -> bool:
        """Whether there was any prompt."""
        return bool(self._first)

    @property
    def is_known(self) -> bool:
        """Whether there were enough of them to learn a shape from."""
        return len(self._first) == _FEW

    def observe(self, seconds: float, num_tokens: int, second: int) -> None:
        """Learn from one prompt."""
        if len(self._first) < _FEW:
            self._first.append((seconds, num_tokens, second))
        else:
            self.fit.observe(seconds, num_tokens, second)

    def read_again(self, shape: LinearFit) -> None:
        """Read this engine's few prompts again in a shape that is better known by now: one tells a speed only."""
        self.fit = LinearFit(*self._priors)
        self.fit.take_from(shape)
        for first in self._first:
            self.fit.observe(*first)


class LearnedRates:
    """Rates of one decode engine and its prefill engines, learned online. Never negative, never NaN.

    All take and return seconds; times that are not positive and finite are ignored.

    Args:
        prior: where to begin. Its `attention_tokens` should be the model's; speeds need be of no machine, since the
            first observation sets them.
    """

    def __init__(self, prior: ConstantRates | None = None) -> None:
        self._prior = prior = prior if prior is not None else ConstantRates()
        token_s = 1 / prior.prefill_tokens_per_s
        priors = _PREFILL_FIXED_S, token_s, token_s / prior.attention_tokens
        # Of both engines together: they compute the same model. None when each is known by itself.
        self._shape: LinearFit | None = LinearFit(*priors)
        self._prefill, self._append = _Computing(priors), _Computing(priors)
        self._pairs: dict[str, _Pair] = {}
        self._default_pair = _Pair(prior)
        self._decode_step_s: float | None = None
        self._stall_token_s: float | None = None
        self._expect = LinearFit.expect_s
        self._is_hopeful = False

    def hoped(self) -> "LearnedRates":
        """Return a view of these rates as they are at their best: engines as fast as lately, links as the prior's.

        A link can be repaired from one moment to the next; what a way would cost then tells whether trying it pays.
        Not for observing, and only for now.
        """
        view = object.__new__(LearnedRates)  # `copy.copy` takes ten times as long
        view.__dict__.update(self.__dict__)
        view._expect, view._is_hopeful = LinearFit.hope_s, True
        return view

    # ---------------------------------------------------------------- what things cost

    def prefill_s(self, num_tokens: int, *, num_cached: int = 0) -> float:
        """Return how long P takes to compute `num_tokens` behind `num_cached` tokens, the call included."""
        return self._expect(self._prefill.fit, num_tokens, num_tokens * (2 * num_cached + num_tokens))

    def append_s(self, num_tokens: int, *, num_cached: int = 0) -> float:
        """Return how long D takes to compute `num_tokens` behind `num_cached` tokens, up to the first new token.

        Unseen, D computes as fast as P: then what travels decides.
        """
        engine = self._append if self._append.is_observed else self._prefill
        return self._expect(engine.fit, num_tokens, num_tokens * (2 * num_cached + num_tokens))

    def stall_s(self, num_tokens: int, *, num_cached: int = 0) -> float:
        """Return how long computing so many tokens on D holds up each request that generates there meanwhile."""
        if self._stall_token_s is not None:
            return self._stall_token_s * num_tokens
        return self.append_s(num_tokens, num_cached=num_cached)

    def fetch_s(self, num_bytes: int, *, pair: str = "") -> float:
        """Return how long P takes to read so many bytes from D, a pair's first read apart."""
        known = self._pairs.get(pair, self._default_pair)
        if known.fetch.num_observed or not known.handover.num_observed:
            seconds = known.fetch.expect_s(num_bytes)
        else:
            fixed_s, byte_s, _ = known.handover.coefficients
            seconds = max(fixed_s - self.decode_step_s, 0.0) + byte_s * num_bytes
        return min(seconds, self._prior.fetch_s(num_bytes)) if self._is_hopeful else seconds

    def handover_s(self, num_bytes: int, *, pair: str = "") -> float:
        """Return how long it takes from P's answer to the first token, of which D reads so many bytes from P."""
        known = self._pairs.get(pair, self._default_pair)
        if known.handover.num_observed or not known.fetch.num_observed:
            seconds = known.handover.expect_s(num_bytes)
        else:
            seconds = known.fetch.expect_s(num_bytes) + self.decode_step_s
        return min(seconds, self._prior.fetch_s(num_bytes) + self.decode_step_s) if self._is_hopeful else seconds

    @property
    def decode_step_s(self) -> float:
        """How long D takes for one step that generates only."""
        return self._decode_step_s if self._decode_step_s is not None else _DECODE_STEP_S

    # ---------------------------------------------------------------- what was seen

    def observe_prefill(self, seconds: float, num_tokens: int, *, num_cached: int = 0) -> None:
        """Learn from P's work on a prompt, without its fetch."""
        self._observe_computing(self._prefill, seconds, num_tokens, num_cached)

    def observe_append(self, seconds: float, num_tokens: int, *, num_cached: int = 0) -> None:
        """Learn from D's work on a prompt, up to its first new token."""
        self._observe_computing(self._append, seconds, num_tokens, num_cached)

    def _observe_computing(self, engine: "_Computing", seconds: float, num_tokens: int, num_cached: int) -> None:
        second = num_tokens * (2 * num_cached + num_tokens)
        engine.observe(seconds, num_tokens, second)
        if self._shape is None:
            return
        self._shape.observe(seconds, num_tokens, second)
        if not self._append.is_known:
            self._append.read_again(self._shape)
        # Unseen, P stays as fast as the prior has it, so that it is tried.
        if self._prefill.is_observed and not self._prefill.is_known:
            self._prefill.read_again(self._shape)
        if self._append.is_known and self._prefill.is_known:
            self._shape = None

    def observe_fetch(self, seconds: float, num_bytes: int, *, pair: str = "") -> None:
        """Learn from P's read; a pair's first one has its handshake in it, and says nothing of the next."""
        known = self._pair(pair)
        if known.has_fetched:
            known.fetch.observe(seconds, num_bytes)
        known.has_fetched = True

    def observe_handover(self, seconds: float, num_bytes: int, *, pair: str = "") -> None:
        """Learn from the time between P's answer and the first token; a pair's first one has its handshake in it."""
        known = self._pair(pair)
        if known.has_handed_over:
            known.handover.observe(seconds, num_bytes)
        known.has_handed_over = True

    def observe_step(self, seconds: float, *, num_decodes: int, num_prompt_tokens: int) -> None:
        """Learn from a step of D in which so many requests generated, and so many prompt tokens were computed."""
        if not 0 < seconds < 1e9 or not num_decodes:  # noqa: PLR2004 (no step is that long)
            return
        if not num_prompt_tokens:
            self._decode_step_s = _mean(self._decode_step_s, seconds)
        elif self._decode_step_s is not None:
            extra_s = max(seconds - self._decode_step_s, 0.0)
            self._stall_token_s = _mean(self._stall_token_s, extra_s / num_prompt_tokens)

    def _pair(self, pair: str) -> _Pair:
        if pair not in self._pairs:
            self._pairs[pair] = _Pair(self._prior)
        return self._pairs[pair]


class MarginalRates:
    """What learned rates say that more or less of something costs, its fixed time aside.

    For what a lease is worth: its session pays the fixed time of a prefill in any case. Satisfies `Rates`.
    """

    def __init__(self, rates: LearnedRates) -> None:
        self._rates = rates

    def prefill_s(self, num_tokens: int, *, num_cached: int = 0) -> float:
        """Return how long P takes to compute so many tokens, beyond what it takes for none."""
        return self._rates.prefill_s(num_tokens, num_cached=num_cached) - self._rates.prefill_s(0)

    def fetch_s(self, num_bytes: int) -> float:
        """Return how long reading so many bytes takes, beyond what it takes for none."""
        return self._rates.fetch_s(num_bytes) - self._rates.fetch_s(0)


def _mean(mean: float | None, value: float) -> float:
    """Return a running mean with one more value, whose weight is cut where it is far above."""
    if mean is None or mean <= 0:
        return value
    return mean + _WEIGHT * (min(value, _MAX_RATIO * mean) - mean)
