"""The physical limit of what fetching can gain, from rates that the same run measured. Pure arithmetic.

To compute d new tokens behind a history of H tokens a prefill engine needs

    T(d | H) = a * d + b * ((H + d)^2 - H^2)

`a` is the work on weights, `b` that of attention. `PrefillRate.fit` finds both from turns that computed their whole
prompt (H = 0, d = N). A turn that fetches its history instead reads H tokens and computes d = N - H, so the ceiling
of its gain is

    T(N | 0) / (T_fetch(H) + T(d | H))

where T_fetch is the read as that turn measured it. Left out are rendering, control calls, handing over to the decode
engine and its first token: all that the session layer and the network of HTTP calls add lowers the measured ratio.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable


@dataclass(frozen=True, slots=True)
class PrefillRate:
    """How fast a prefill engine computes."""

    linear_s: float
    """Seconds per token (`a`)."""
    quadratic_s: float
    """Seconds per token squared (`b`)."""

    def compute_s(self, num_new: int, num_before: int = 0) -> float:
        """Return the seconds that `num_new` tokens take behind `num_before` that are there already."""
        num_total = num_before + num_new
        return self.linear_s * num_new + self.quadratic_s * (num_total**2 - num_before**2)

    @classmethod
    def fit(cls, points: Iterable[tuple[int, float]]) -> PrefillRate:
        """Fit the rate by least squares; neither part is negative.

        Args:
            points: Number of tokens, and the seconds that computing all of them took.

        Raises:
            ValueError: There are no points.
        """
        pairs = list(points)
        if not pairs:
            msg = "no turn computed its prompt, so there is no prefill rate; look into the engines' logs"
            raise ValueError(msg)
        n2, n3, n4 = (sum(num**power for num, _ in pairs) for power in (2, 3, 4))
        tn, tn2 = (sum(seconds * num**power for num, seconds in pairs) for power in (1, 2))
        determinant = n2 * n4 - n3**2
        if determinant == 0:  # one length only: it cannot tell the two parts apart
            return cls(tn / n2, 0.0)
        linear_s = (tn * n4 - tn2 * n3) / determinant
        quadratic_s = (tn2 * n2 - tn * n3) / determinant
        # Noise can push one of them below zero, where the best fit has it at zero.
        if quadratic_s < 0:
            return cls(tn / n2, 0.0)
        return cls(linear_s, quadratic_s) if linear_s >= 0 else cls(0.0, tn2 / n4)


def ceiling(rate: PrefillRate, *, held_tokens: int, prompt_tokens: int, fetch_s: float) -> float:
    """Return how many times faster a turn can be at best when its history is fetched."""
    delta_s = rate.compute_s(prompt_tokens - held_tokens, held_tokens)
    return rate.compute_s(prompt_tokens) / (fetch_s + delta_s)
