"""Least squares for times: no cost is below 0, relative errors count, and outliers of a shared machine count little."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
_HUBER = 1.345
"""Deviations beyond so many standard deviations count by their size, not by its square."""
_ROUNDS = 50
_LEAST_SPREAD = 1e-9
_MAD_TO_DEVIATION = 1.4826


@dataclass(frozen=True)
class Residuals:
    """How far predictions are off: |predicted - measured| / measured, and the sum of predictions over that of what was
    measured."""

    count: int
    median: float
    p90: float
    total_ratio: float

    @classmethod
    def of(cls, predicted: Array, measured: Array) -> Residuals:
        """Of at least one pair of seconds."""
        errors = np.abs(predicted - measured) / measured
        return cls(
            len(measured),
            float(np.median(errors)),
            float(np.percentile(errors, 90)),
            float(predicted.sum() / measured.sum()),
        )


def fit_times(features: Array, seconds: Array) -> Array:
    """Costs [terms], none below 0, such that `features @ costs` [steps] comes close to `seconds` [steps].

    Huber's loss of relative errors, by reweighting. A term that no step has costs 0.
    """
    weights = 1.0 / seconds
    shares = np.ones(len(seconds))
    costs = np.zeros(features.shape[1])
    for _ in range(_ROUNDS):
        factor = weights * np.sqrt(shares)
        found = _nonnegative(features * factor[:, None], seconds * factor)
        errors = np.abs(features @ found - seconds) / seconds
        deviation = max(_MAD_TO_DEVIATION * float(np.median(errors)), _LEAST_SPREAD)
        shares = np.minimum(1.0, _HUBER * deviation / np.maximum(errors, _LEAST_SPREAD))
        settled = np.allclose(found, costs, rtol=1e-9, atol=0.0)
        costs = found
        if settled:
            break
    return costs


def _nonnegative(features: Array, values: Array) -> Array:
    """Least squares without terms below 0: of all choices of terms, the closest of those in which none is. Terms are
    few, so that all choices can be tried."""
    scale = np.sqrt((features**2).sum(axis=0))
    terms = np.flatnonzero(scale > 0)
    orthogonal, triangle = np.linalg.qr(features[:, terms] / scale[terms])
    target = orthogonal.T @ values
    best, closest = np.zeros(len(terms)), float(target @ target)
    for count in range(1, len(terms) + 1):
        for chosen in itertools.combinations(range(len(terms)), count):
            found = np.linalg.lstsq(triangle[:, chosen], target, rcond=None)[0]
            rest = target - triangle[:, chosen] @ found
            if (found >= 0).all() and float(rest @ rest) < closest:
                best, closest = np.zeros(len(terms)), float(rest @ rest)
                best[list(chosen)] = found
    costs = np.zeros(len(scale))
    costs[terms] = best / scale[terms]
    return costs
