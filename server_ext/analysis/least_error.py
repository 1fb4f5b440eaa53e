"""Fits costs to times that were measured on real machines. Pure, on numpy.

A machine's noise is a share of what it measures: a prompt of a minute is off by seconds, one of a few tokens by
milliseconds, and both tell as much. So it is relative errors that are made small, by their size and not their square,
for a turn that something else held up must not bend the rest; and no cost is ever a gain.
"""

from collections.abc import Sequence
from typing import Any, Final

import numpy as np

_ROUNDS: Final = 30
_LEAST_ERROR: Final = 1e-3


def fit_costs(rows: Sequence[tuple[float, ...]], seconds: Sequence[float]) -> list[float]:
    """Return the costs [num_columns], 0 or more, that explain `seconds` [num_rows] best.

    Args:
        rows: [num_rows][num_columns], how often each cost was paid.
        seconds: what that took, more than 0.
    """
    columns, values = np.asarray(rows, dtype=np.float64), np.asarray(seconds, dtype=np.float64)
    found = _solve(columns, values)
    for _ in range(_ROUNDS):
        expected = np.maximum(columns @ np.asarray(found), 1e-9)
        errors = np.abs(values / expected - 1)
        scale = expected * np.sqrt(np.maximum(errors, _LEAST_ERROR))
        found = _solve(columns / scale[:, None], values / scale)
    return found


def _solve(columns: Any, values: Any) -> list[float]:
    """Return the least-squares coefficients, 0 or more, of `columns` [num_rows, num_columns] against `values`."""
    used = list(range(columns.shape[1]))
    found: list[float] = [0.0] * columns.shape[1]
    while used:
        scale = np.abs(columns[:, used]).max(axis=0)
        scale[scale == 0] = 1.0
        solved: Any = np.linalg.lstsq(columns[:, used] / scale, values, rcond=None)[0] / scale
        if (solved >= 0).all():
            for index, value in zip(used, solved.tolist(), strict=True):
                found[index] = value
            break
        # What would be a gain is left out, and the rest fitted anew.
        used.pop(int(np.argmin(solved * scale)))
    return found
