"""How far counts are off their distribution."""

from __future__ import annotations

import math

import numpy as np


def excess(observed: np.ndarray, distribution: np.ndarray) -> float:
    """Chi-square less its mean, in standard deviations; infinite where something came up that cannot."""
    if observed[distribution == 0].any():
        return math.inf
    expected = distribution * observed.sum()
    common = expected >= 10
    bins = [*zip(observed[common], expected[common], strict=True)]
    if (~common).any() and expected[~common].sum() >= 10:
        bins.append((observed[~common].sum(), expected[~common].sum()))
    degrees = max(len(bins) - 1, 1)
    return (sum((o - e) ** 2 / e for o, e in bins) - degrees) / math.sqrt(2 * degrees)


# A fair sampler passes LIMIT but once in some hundred thousand runs; these runs are always the same.
LIMIT = 6.0
