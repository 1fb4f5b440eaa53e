"""What something costs, learned online: seconds as a sum of features, each times a coefficient that is never negative.

A Kalman filter over few coefficients that treats their errors as independent: so all move the same way with a
surprise, in proportion to what each may be wrong by, and none is driven below zero by another one. A random walk
lets old observations fade. Coefficients count in units of their priors, so one set of constants serves GPU and CPU.
Two habits beyond the textbook:

- The first observation scales all coefficients alike: a prior knows the shape of a cost, not the machine's speed.
- An observation far off is put aside. One strange turn is noise; a second one in the same direction is news, and then
  both count, with coefficients free to move that far.

Deterministic, O(coefficients) per event. Pure; imports nothing of ours.
"""

import math
from collections.abc import Sequence
from typing import Final

# Two observations of the same thing differ by about so much on a busy machine, and by no less than this.
_NOISE_SHARE: Final = 0.15
_NOISE_S: Final = 0.001
# How far a coefficient may wander from one observation to the next.
_WALK_SHARE: Final = 0.07
# A coefficient that fell to nothing wanders as if it were at least so large, against the common scale.
_LEAST_SIZE: Final = 0.1
# An observation is strange when it lies more than so many standard deviations off.
_GATE: Final = 3.5
# A strange one is forgotten after so many that were as expected.
_MAX_SINCE_ASIDE: Final = 8
# News change rates rather than fixed costs: a link gets slower, the call over it stays a call.
_FIXED_MOBILITY: Final = 0.3
# Of one observation: after some dozens nobody hopes for what was before them.
_HOPE_FADES: Final = 0.02
# Hope has an end: nothing gets ten times faster by being known better.
_LEAST_HOPE: Final = 0.1
# Whatever is observed, an expectation stays a positive number.
_MIN_S: Final = 1e-9
_MAX_S: Final = 1e9


class LinearFit:
    """Learns the coefficients of a cost.

    Args:
        priors: [num_coefficients], seconds per unit of each feature, above 0. The first feature is always 1: what
            this costs however little there is to do.
    """

    __slots__ = ("_aside", "_hopes", "_num_since_aside", "_priors", "_scale", "_values", "_variances", "num_observed")

    def __init__(self, *priors: float) -> None:
        self.num_observed = 0
        self._priors = priors
        self._values = [1.0] * len(priors)
        self._hopes = self._values
        self._scale = 1.0
        self._variances = [1.0] * len(priors)
        self._aside: tuple[Sequence[float], float] | None = None
        self._num_since_aside = 0

    @property
    def coefficients(self) -> list[float]:
        """[num_coefficients], seconds per unit of each feature, as they are believed now."""
        return [value * prior for value, prior in zip(self._values, self._priors, strict=True)]

    def expect_s(self, *features: float) -> float:
        """Return the seconds that this is expected to take; always above 0."""
        total = 0.0
        for feature, prior, value in zip(features, self._priors, self._values, strict=True):
            total += feature * prior * value
        return max(total, _MIN_S)

    def hope_s(self, *features: float) -> float:
        """Return the seconds that this may take with some luck; always above 0.

        It is what it was at its best, lately, less what the expectation may be wrong by.
        """
        total, variance = 0.0, 0.0
        for feature, prior, hope, spread in zip(features, self._priors, self._hopes, self._variances, strict=True):
            unit = feature * prior
            total += unit * hope
            variance += unit * unit * spread
        expected_s = self.expect_s(*features)
        return max(min(total, expected_s) - math.sqrt(variance), _LEAST_HOPE * expected_s, _MIN_S)

    def take_from(self, other: "LinearFit") -> None:
        """Believe what another fit of the same shape has learned; nothing counts as observed here."""
        self._values = self._hopes = [c / prior for c, prior in zip(other.coefficients, self._priors, strict=True)]
        self._scale = sum(self._values) / len(self._values)
        self._loosen(1.0)

    def observe(self, seconds: float, *features: float) -> None:
        """Learn from one observation; one that is no positive, finite number of seconds is ignored."""
        if not _MIN_S <= seconds <= _MAX_S:
            return
        self.num_observed += 1
        expected_s = self.expect_s(*features)
        if self.num_observed == 1:
            self._scale_by(seconds / expected_s)
            self._hopes = list(self._values)
        elif not self._is_strange(seconds, expected_s, features):
            self._num_since_aside += 1
            self._learn(seconds, features)
        else:
            self._take_strange(seconds, expected_s, features)

    # ---------------------------------------------------------------- steps

    def _scale_by(self, ratio: float) -> None:
        self._values = [value * ratio for value in self._values]
        self._scale *= ratio
        self._loosen(1.0)

    def _loosen(self, ratio: float) -> None:
        """Let every coefficient be wrong by its own size, times `ratio`."""
        least = _LEAST_SIZE * self._scale
        self._variances = [(max(value, least) * ratio) ** 2 for value in self._values]

    def _is_strange(self, seconds: float, expected_s: float, features: Sequence[float]) -> bool:
        units = [f * p for f, p in zip(features, self._priors, strict=True)]
        variance = sum([v * u * u for v, u in zip(self._variances, units, strict=True)])
        return abs(seconds - expected_s) > _GATE * math.sqrt(variance + _noise(expected_s))

    def _take_strange(self, seconds: float, expected_s: float, features: Sequence[float]) -> None:
        before, self._aside = self._aside, (features, seconds)
        is_fresh, self._num_since_aside = self._num_since_aside <= _MAX_SINCE_ASIDE, 0
        if before is None or not is_fresh:
            return
        before_features, before_s = before
        before_expected_s = self.expect_s(*before_features)
        if (before_s > before_expected_s) != (seconds > expected_s):
            return
        self._aside = None
        for features_, seconds_ in (before, (features, seconds)):
            # Anew for each: the second one may lie in another corner than the first.
            ratio = max(seconds_ / self.expect_s(*features_), 1.0)
            self._loosen(ratio)
            if ratio > 1:
                self._variances[0] *= _FIXED_MOBILITY**2
            self._learn(seconds_, features_)
        self._loosen(1.0)

    def _learn(self, seconds: float, features: Sequence[float]) -> None:
        units = [f * p for f, p in zip(features, self._priors, strict=True)]
        along = [v * u for v, u in zip(self._variances, units, strict=True)]
        expected_s = self.expect_s(*features)
        noise = _noise(max(expected_s, seconds))
        total = sum([a * u for a, u in zip(along, units, strict=True)]) + noise
        surprise_s, least = seconds - expected_s, _LEAST_SIZE * self._scale
        for i, (a, u) in enumerate(zip(along, units, strict=True)):
            value = self._values[i] = max(self._values[i] + a / total * surprise_s, 0.0)
            shrunk = self._variances[i] * (1 - a * u / total)
            self._variances[i] = shrunk + (_WALK_SHARE * max(value, least)) ** 2
        hoped_s = sum([hope * u for hope, u in zip(self._hopes, units, strict=True)])
        fades = 1.0 if self.expect_s(*features) <= hoped_s else _HOPE_FADES
        self._hopes = [hope + fades * (value - hope) for hope, value in zip(self._hopes, self._values, strict=True)]


def _noise(seconds: float) -> float:
    return (_NOISE_SHARE * seconds) ** 2 + _NOISE_S**2
