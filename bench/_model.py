"""The physical limit of what fetching can gain, from the rates that the same run measured. Pure arithmetic.

A model with P weights outside its embeddings, L layers and hidden size D needs for d new tokens behind a history of H

    2 P d + 2 L D ((H + d)^2 - H^2)   floating-point operations:  T(d | H) = c + a (d + ((H + d)^2 - H^2) / A)

with `A = P / (L D)`, the length at which attention costs as much as the weights, known from the model. Measured are
`a`, the seconds per token of a short prompt, and `c`, what each prefill costs however little it computes (the call,
and reading all weights once): `PrefillRate.fit` takes both from turns that computed their whole prompt (H = 0, d = N),
long ones and some of a few tokens. A turn that fetches its history instead reads H tokens and computes d = N - H, so
the ceiling of its gain is

    T(N | 0) / (T_fetch(H) + T(d | H))

where T_fetch is the read as that turn measured it. Left out are rendering, control calls, handing over to the decode
engine and its first token: all that the session layer and the network of HTTP calls add lowers the measured ratio.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import linear_regression
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping


def attention_tokens(config: Mapping[str, Any]) -> float:
    """Return the length, in tokens, at which attention costs as much as the weights (A).

    Args:
        config: `config.json` of a Llama-like model.
    """
    hidden = config["hidden_size"]
    kv_width = hidden // config["num_attention_heads"] * config["num_key_value_heads"]
    num_weights_per_layer = 2 * hidden * (hidden + kv_width) + 3 * hidden * config["intermediate_size"]
    return float(num_weights_per_layer / hidden)  # both P and L D have L in them


@dataclass(frozen=True, slots=True)
class PrefillRate:
    """How fast a prefill engine computes."""

    fixed_s: float
    """Seconds of a prefill that computes next to nothing (`c`)."""
    token_s: float
    """Seconds per token of a short prompt (`a`)."""
    attention_tokens: float
    """Length at which attention costs as much as the weights (`A`)."""

    def compute_s(self, num_new: int, num_before: int = 0) -> float:
        """Return the seconds that `num_new` tokens take behind `num_before` that are there already."""
        return self.fixed_s + self.token_s * self._work(num_new, num_before)

    def _work(self, num_new: int, num_before: int = 0) -> float:
        return num_new + ((num_before + num_new) ** 2 - num_before**2) / self.attention_tokens

    @classmethod
    def fit(cls, points: Iterable[tuple[int, float]], attention_tokens: float) -> PrefillRate:
        """Fit the rate by least squares.

        Args:
            points: Number of tokens, and the seconds that computing all of them took.
            attention_tokens: Of the model.

        Raises:
            ValueError: There are no two points of different length.
        """
        unit = cls(0.0, 1.0, attention_tokens)
        pairs = [(unit.compute_s(num_tokens), seconds) for num_tokens, seconds in points]
        if len({work for work, _ in pairs}) < 2:
            msg = "too few turns computed their prompt for a prefill rate; look into the engines' logs"
            raise ValueError(msg)
        token_s, fixed_s = linear_regression([work for work, _ in pairs], [seconds for _, seconds in pairs])
        return cls(max(fixed_s, 0.0), token_s, attention_tokens)


def ceiling(rate: PrefillRate, *, held_tokens: int, prompt_tokens: int, fetch_s: float) -> float:
    """Return how many times faster a turn can be at best when its history is fetched."""
    delta_s = rate.compute_s(prompt_tokens - held_tokens, held_tokens)
    return rate.compute_s(prompt_tokens) / (fetch_s + delta_s)
