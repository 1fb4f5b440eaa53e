"""What something costs, learned online: a fixed time, and one or two amounts, each times a rate that is never negative.

A Kalman filter over these coefficients that treats their errors as independent: so all move the same way with a
surprise, in proportion to what each may be wrong by, and none is driven below zero by another one. A random walk
lets old observations fade. Coefficients count in units of their priors, so one set of constants serves GPU and CPU.
Two habits beyond the textbook:

- The first observation scales all coefficients alike: a prior knows the shape of a cost, not the machine's speed.
- An observation far off is put aside. One strange turn is noise; a second one in the same direction is news, and then
  both count, with coefficients free to move that far.

Deterministic, O(1) per event; to expect is asked for each lease under memory pressure, so it is one line. Pure;
imports nothing of ours.
"""

import math
from typing import Final, TypeAlias

# Two observations of the same thing differ by about so much on a busy machine, and by no less than this.
_NOISE_SHARE: Final = 0.15
_LEAST_NOISE: Final = 0.001**2
# How far a coefficient may wander from one observation to the next.
_WALK_SHARE: Final = 0.07
# A coefficient that fell to nothing wanders as if it were at least so large, against the common scale.
_LEAST_SIZE: Final = 0.1
# An observation is strange when it lies more than so many standard deviations off.
_GATE: Final = 3.5
# A strange one is forgotten after so many that were as expected.
_MAX_SINCE_ASIDE: Final = 8
# News change rates rather than fixed costs: a link gets slower, the call over it stays a call.
_FIXED_MOBILITY: Final = 0.1
# Of one observation: after some dozens nobody hopes for what was before them.
_HOPE_FADES: Final = 0.02
# Hope has an end: nothing gets ten times faster by being known better.
_LEAST_HOPE: Final = 0.1
# Whatever is observed, an expectation stays a positive number.
_MIN_S: Final = 1e-9
_MAX_S: Final = 1e9

Three: TypeAlias = tuple[float, float, float]
"""Of the fixed time and of the two amounts."""


class LinearFit:
    """Learns a cost: `fixed_s + rate_s * amount + second_rate_s * second`.

    Args:
        fixed_s: prior of what this costs however little there is to do, in seconds, above 0.
        rate_s: prior of the seconds per unit of the amount, above 0.
        second_rate_s: the same of the second amount; 0 where there is none.
    """

    __slots__ = (
        "_aside", "_coefficients", "_hopes", "_num_since_aside", "_priors", "_scale", "_values", "_variances",
        "num_observed",
    )  # fmt: skip

    def __init__(self, fixed_s: float, rate_s: float, second_rate_s: float = 0.0) -> None:
        self.num_observed = 0
        self._priors = self._coefficients = (fixed_s, rate_s, second_rate_s)
        self._values = self._hopes = (1.0, 1.0, 1.0)
        self._scale = 1.0
        self._variances = (1.0, 1.0, 1.0)
        self._aside: tuple[float, Three] | None = None
        self._num_since_aside = 0

    @property
    def coefficients(self) -> Three:
        """The fixed time in seconds and the two rates in seconds per unit, as they are believed now."""
        return self._coefficients

    def expect_s(self, amount: float, second: float = 0.0) -> float:
        """Return the seconds that this is expected to take; always above 0."""
        fixed_s, rate_s, second_rate_s = self._coefficients
        return fixed_s + rate_s * amount + second_rate_s * second or _MIN_S

    def hope_s(self, amount: float, second: float = 0.0) -> float:
        """Return the seconds that this may take with some luck; always above 0.

        It is what it was at its best, lately, less what the expectation may be wrong by.
        """
        units = self._units(amount, second)
        expected_s = self.expect_s(amount, second)
        best_s = min(_dot(self._hopes, units), expected_s)
        return max(best_s - math.sqrt(self._variance(units)), _LEAST_HOPE * expected_s)

    def take_from(self, other: "LinearFit") -> None:
        """Believe what another fit with the same priors has learned; nothing counts as observed here."""
        self._believe(*other._values)  # noqa: SLF001 (of this class)
        self._hopes, self._scale = self._values, sum(self._values) / len(self._values)
        self._loosen()

    def observe(self, seconds: float, amount: float, second: float = 0.0) -> None:
        """Learn from one observation; one that is no positive, finite number of seconds is ignored."""
        if not _MIN_S <= seconds <= _MAX_S:
            return
        self.num_observed += 1
        units, expected_s = self._units(amount, second), self.expect_s(amount, second)
        variance = self._variance(units)
        if self.num_observed == 1:
            ratio = seconds / expected_s
            self._believe(*[value * ratio for value in self._values])
            self._hopes, self._scale = self._values, self._scale * ratio
            self._loosen()
        elif abs(seconds - expected_s) <= _GATE * math.sqrt(variance + _noise(expected_s)):
            self._num_since_aside += 1
            self._learn(seconds, units, variance)
        else:
            self._take_strange(seconds, units)

    # ---------------------------------------------------------------- steps

    def _units(self, amount: float, second: float) -> Three:
        """Return the seconds that each coefficient stands for at its prior."""
        fixed_s, rate_s, second_rate_s = self._priors
        return fixed_s, rate_s * amount, second_rate_s * second

    def _variance(self, units: Three) -> float:
        variances, (fixed, rate, second) = self._variances, units
        return variances[0] * fixed * fixed + variances[1] * rate * rate + variances[2] * second * second

    def _believe(self, fixed: float, rate: float, second: float) -> None:
        self._values = fixed, rate, second
        fixed_s, rate_s, second_rate_s = self._priors
        self._coefficients = fixed * fixed_s, rate * rate_s, second * second_rate_s

    def _loosen(self) -> None:
        """Let every coefficient be wrong by its own size."""
        least = _LEAST_SIZE * self._scale
        fixed, rate, second = [max(value, least) ** 2 for value in self._values]
        self._variances = fixed, rate, second

    def _loosen_upwards(self, missing_s: float, units: Three) -> None:
        """Let the rates together, and less so the fixed time, be wrong by as much as explains what is missing."""
        least = _LEAST_SIZE * self._scale
        _, rate, second = [max(value, least) for value in self._values]
        growth = missing_s / max(rate * units[1] + second * units[2], _MIN_S)
        fixed = _FIXED_MOBILITY * missing_s / units[0]
        self._variances = fixed**2, (rate * growth) ** 2, (second * growth) ** 2

    def _take_strange(self, seconds: float, units: Three) -> None:
        before, self._aside = self._aside, (seconds, units)
        is_fresh, self._num_since_aside = self._num_since_aside <= _MAX_SINCE_ASIDE, 0
        if before is None or not is_fresh:
            return
        before_s, before_units = before
        if (before_s > _dot(self._values, before_units)) != (seconds > _dot(self._values, units)):
            return
        self._aside = None
        for seconds_, units_ in (before, (seconds, units)):
            # Anew for each: the second one may lie in another corner than the first.
            missing_s = seconds_ - _dot(self._values, units_)
            if missing_s > 0:
                self._loosen_upwards(missing_s, units_)
            else:
                self._loosen()
            self._learn(seconds_, units_, self._variance(units_))
        self._loosen()

    def _learn(self, seconds: float, units: Three, variance: float) -> None:
        # Written out for the three coefficients: this runs four times a turn, on the scheduler's thread.
        (fixed, rate, second), (fixed_s, rate_s, second_s) = self._values, units
        fixed_variance, rate_variance, second_variance = self._variances
        expected_s = fixed * fixed_s + rate * rate_s + second * second_s
        total = variance + _noise(expected_s if expected_s > seconds else seconds)  # noqa: FURB136
        pull, least = (seconds - expected_s) / total, _LEAST_SIZE * self._scale
        fixed_along, rate_along, second_along = (
            fixed_variance * fixed_s,
            rate_variance * rate_s,
            second_variance * second_s,
        )
        fixed, rate, second = fixed + fixed_along * pull, rate + rate_along * pull, second + second_along * pull
        if not fixed > 0.0:
            fixed = 0.0
        if not rate > 0.0:
            rate = 0.0
        if not second > 0.0:
            second = 0.0
        fixed_walk = _WALK_SHARE * (fixed if fixed > least else least)  # noqa: FURB136
        rate_walk = _WALK_SHARE * (rate if rate > least else least)  # noqa: FURB136
        second_walk = _WALK_SHARE * (second if second > least else least)  # noqa: FURB136
        self._variances = (
            fixed_variance + (fixed_walk * fixed_walk - fixed_along * fixed_along / total),
            rate_variance + (rate_walk * rate_walk - rate_along * rate_along / total),
            second_variance + (second_walk * second_walk - second_along * second_along / total),
        )
        self._values = fixed, rate, second
        priors, (fixed_hope, rate_hope, second_hope) = self._priors, self._hopes
        self._coefficients = fixed * priors[0], rate * priors[1], second * priors[2]
        is_best = fixed * fixed_s + rate * rate_s + second * second_s <= _dot(self._hopes, units)
        fades = 1.0 if is_best else _HOPE_FADES
        self._hopes = (
            fixed_hope + fades * (fixed - fixed_hope),
            rate_hope + fades * (rate - rate_hope),
            second_hope + fades * (second - second_hope),
        )


def _dot(values: Three, units: Three) -> float:
    return values[0] * units[0] + values[1] * units[1] + values[2] * units[2]


def _noise(seconds: float) -> float:
    return (_NOISE_SHARE * seconds) ** 2 + _LEAST_NOISE
