from __future__ import annotations

import math

import numpy as np


def excess(observed: np.ndarray, distribution: np.ndarray) -> float:
    """Returns chi-square less its mean, in standard deviations; infinite for impossible counts."""
    if observed[distribution == 0].any():
        return math.inf
    expected = distribution * observed.sum()
    common = expected >= 10
    bins = [*zip(observed[common], expected[common], strict=True)]
    if (~common).any() and expected[~common].sum() >= 10:
        bins.append((observed[~common].sum(), expected[~common].sum()))
    degrees = max(len(bins) - 1, 1)
    return (sum((o - e) ** 2 / e for o, e in bins) - degrees) / math.sqrt(2 * degrees)


# Fair samplers exceed LIMIT once in some hundred thousand runs; seeds are fixed.
LIMIT = 6.0
