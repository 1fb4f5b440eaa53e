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
from statistics import median
from typing import TYPE_CHECKING, Any

from server_ext.analysis.least_error import fit_costs
from server_ext.core.cost import floor_s

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from server_ext.benchmark.samples import Sample


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
        """Fit the rate (see `fit_costs`).

        Args:
            points: number of tokens, and the seconds that computing all of them took.
            attention_tokens: of the model.

        Raises:
            ValueError: there are no two points of different length.
        """
        unit, points = cls(0.0, 1.0, attention_tokens), list(points)
        rows = [(1.0, unit.compute_s(num_tokens)) for num_tokens, _ in points]
        if len(set(rows)) < 2:  # noqa: PLR2004 (a line needs two points)
            msg = "too few turns computed their prompt for a prefill rate; look into the engines' logs"
            raise ValueError(msg)
        fixed_s, token_s = fit_costs(rows, [seconds for _, seconds in points])
        return cls(fixed_s, token_s, attention_tokens)


def ceiling(rate: PrefillRate, *, held_tokens: int, prompt_tokens: int, fetch_s: float) -> float:
    """Return how many times faster a turn can be at best when its history is fetched."""
    delta_s = rate.compute_s(prompt_tokens - held_tokens, held_tokens)
    return rate.compute_s(prompt_tokens) / (fetch_s + delta_s)


def kv_bytes_per_token(config: Mapping[str, Any], *, value_bytes: int = 4) -> int:
    """Return the size of one token's keys and values in all layers.

    Args:
        config: `config.json` of a Llama-like model.
        value_bytes: of one number; 4 is float32.
    """
    head = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return int(2 * config["num_hidden_layers"] * config["num_key_value_heads"] * head * value_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredRates:
    """What one run says about its machine."""

    prefill: PrefillRate
    fetch_fixed_s: float
    """Seconds of a read that moves next to nothing."""
    fetch_bytes_per_s: float
    decode_step_s: float
    """Seconds between two tokens on an engine that does nothing else."""
    kv_bytes_per_token: int

    @classmethod
    def fit(
        cls,
        samples: Iterable[Sample],
        *,
        short_prefills: Sequence[tuple[int, float]],
        attention_tokens: float,
        kv_bytes_per_token: int,
    ) -> MeasuredRates:
        """Take the rates from turns that ran alone.

        Args:
            samples: of arms that computed everything, and of arms that fetched.
            short_prefills: tokens and seconds of prompts of a few tokens, all computed.
            attention_tokens: of the model.
            kv_bytes_per_token: of the model.

        Raises:
            ValueError: No turn computed its whole prompt, or none fetched.
        """
        alone = [sample for sample in samples if not sample.beside]
        computed = [
            (one.computed_tokens, one.prefill_s)
            for one in alone
            if one.prefill_s is not None and one.computed_tokens == one.prompt_tokens
        ]
        reads = [(float(one.fetched_tokens * kv_bytes_per_token), one.fetch_s) for one in alone if one.fetch_s]
        if not reads:
            msg = "no turn fetched anything, so there is no rate of fetching; look into the engines' logs"
            raise ValueError(msg)
        times = [seconds for _, seconds in reads]
        fetch_fixed_s, byte_s = fit_costs([(1.0, num_bytes) for num_bytes, _ in reads], times)
        if not byte_s or len({num_bytes for num_bytes, _ in reads}) == 1:
            # Where no slope is shown, all of the cost is put into the bytes.
            fetch_fixed_s, (byte_s,) = 0.0, fit_costs([(num_bytes,) for num_bytes, _ in reads], times)
        gaps = [gap for one in alone for gap in one.gaps_s]
        return cls(
            prefill=PrefillRate.fit([*short_prefills, *computed], attention_tokens),
            fetch_fixed_s=fetch_fixed_s,
            fetch_bytes_per_s=1 / byte_s,
            decode_step_s=median(gaps) if gaps else 0.0,
            kv_bytes_per_token=kv_bytes_per_token,
        )

    def prefill_s(self, num_tokens: int, *, num_cached: int = 0) -> float:
        """Return how long computing `num_tokens` takes behind `num_cached` that are there already."""
        return self.prefill.compute_s(num_tokens, num_cached)

    def fetch_s(self, num_bytes: int, *, pair: str = "") -> float:
        """Return how long reading so many bytes takes; there is one pair."""
        del pair
        return self.fetch_fixed_s + num_bytes / self.fetch_bytes_per_s

    def handover_s(self, num_bytes: int, *, pair: str = "") -> float:
        """Return how long D's read of so many bytes takes, and its first step."""
        return self.fetch_s(num_bytes, pair=pair) + self.decode_step_s

    def floor_s(self, sample: Sample) -> float:
        """Return the least that a turn can take which computes, fetches and hands over what this one did.

        See `core.cost.floor_s`. A turn that D appended by itself has nothing but its computation and one step.
        """
        num_before = sample.prompt_tokens - sample.computed_tokens
        if sample.outcome == "local":
            return self.prefill_s(sample.computed_tokens, num_cached=num_before) + self.decode_step_s
        return floor_s(
            self,
            computed_tokens=sample.computed_tokens,
            cached_tokens=num_before,
            fetched_bytes=sample.fetched_tokens * self.kv_bytes_per_token,
            handover_bytes=sample.computed_tokens * self.kv_bytes_per_token,
        )

    def ceiling(self, sample: Sample) -> float:
        """Return how many times faster than computed a fetched turn can be at best."""
        return ceiling(
            self.prefill,
            held_tokens=sample.fetched_tokens + sample.reused_tokens,
            prompt_tokens=sample.prompt_tokens,
            fetch_s=sample.fetch_s or 0.0,  # unknown: free, so the ceiling is never too low
        )

    def to_json(self) -> dict[str, float]:
        """Return the rates as the file has them."""
        return {
            "prefill_fixed_s": self.prefill.fixed_s,
            "prefill_token_s": self.prefill.token_s,
            "attention_tokens": self.prefill.attention_tokens,
            "fetch_fixed_s": self.fetch_fixed_s,
            "fetch_bytes_per_s": self.fetch_bytes_per_s,
            "decode_step_s": self.decode_step_s,
            "kv_bytes_per_token": self.kv_bytes_per_token,
        }
