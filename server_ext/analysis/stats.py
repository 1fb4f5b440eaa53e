"""Percentiles and distributions of columns, with what a log does not tell (NaN) left out."""

from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

Floats: TypeAlias = npt.NDArray[np.float64]

QUANTILES: Final = (0.05, 0.25, 0.5, 0.75, 0.95, 0.99)
_CDF_POINTS: Final = 160


def quantiles(values: Any) -> dict[str, float] | None:
    """Return `{"p5": …, "p25": …, …}` of values without NaN; None where there are none."""
    values = np.asarray(values, dtype=np.float64)
    values = values[~np.isnan(values)]
    if not values.size:
        return None
    return {f"p{q * 100:g}": float(v) for q, v in zip(QUANTILES, np.quantile(values, QUANTILES), strict=True)}


def cdf(values: Any) -> list[tuple[float, float]]:
    """Return points (value, part of all values up to it) of a distribution, without NaN."""
    values = np.sort(np.asarray(values, dtype=np.float64))
    values = values[~np.isnan(values)]
    if not values.size:
        return []
    at = np.unique(np.linspace(0, values.size - 1, min(_CDF_POINTS, values.size)).astype(int))
    return [(float(values[0]), 0.0), *((float(values[i]), float((i + 1) / values.size)) for i in at)]
