"""Weights of deviations, and likelihoods computed from weights. A weight is a decimal logarithm."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from paceline_server.detect.causes.catalog import CAUSES, UNKNOWN_PRIOR

# A deviation of 1.5 tolerances is neutral. Each further tolerance counts ten times more, up to a
# thousand to one; beyond that, it is more likely that the metric is wrong. No deviation at all is
# thirty to one against: metrics miss some faults (a throttle between two samples).
_NEUTRAL_SCORE = 1.5
_STRONGEST = 3.0
_WEAKEST = -1.5
# Five to one for a change at the onset; up to a thousand to one against a distant change.
_AT_ONSET = 0.7
_FAR_FROM_ONSET = -3.0
# A cause that explains two thirds of the slowdown is neutral; a tenth is fifty to one against.
_NEUTRAL_SHARE = 2 / 3
# Normal metrics of a cause count against it, but less than the deviating metric counts for it.
AGREES = 0.3
DISAGREES = -0.5
# Added to a cause that is the consequence of a deeper one that is present: swapping explains
# memory pressure, a lost link explains errors.
EXPLAINED_AWAY = -2.0
# A cause with this weight or less is ruled out: ten to one against.
RULED_OUT = -1.0


def strength_weight(score: float) -> float:
    """Return the weight of a deviation. `score`: deviation divided by the tolerance."""
    return min(max(score - _NEUTRAL_SCORE, _WEAKEST), _STRONGEST)


def time_weight(distance_seconds: float, tolerance_seconds: float) -> float:
    """Return the weight of the time between the metric's change and the onset.

    `distance_seconds` is 0 if both may have been at the same time.
    """
    beyond = max(distance_seconds - tolerance_seconds, 0.0)
    return max(_AT_ONSET - beyond / tolerance_seconds, _FAR_FROM_ONSET)


def magnitude_weight(predicted: float, slowdown: float) -> float:
    """Compare the slowdown that the metric predicts with the one measured (1: no slower).

    A prediction that is too large costs little, because not all work depends on the metric.
    """
    if slowdown <= 1.0:
        return 0.0
    share = math.log(max(predicted, 1.0)) / math.log(slowdown)
    if share > 1.0:
        return max(0.5 - 0.2 * (share - 1.0), -0.5)
    return max(3.0 * share - 2.0, -2.0) if share < _NEUTRAL_SHARE else 1.5 * (share - 2 / 3)


def combined_weight(weights: Iterable[float]) -> float:
    """Combine the metrics of one cause: the strongest one, adjusted by what most others
    indicate."""
    first, *others = sorted(weights, reverse=True)
    if first <= 0 or not others:
        return first
    agreeing = sum(weight > 0 for weight in others)
    if 2 * agreeing == len(others):
        return first
    return first + (AGREES if 2 * agreeing > len(others) else DISAGREES)


def likelihoods(weights: Mapping[str, float], kind: str) -> dict[str, float]:
    """Return the posterior of each cause that was measured. The rest up to 1 is unknown."""
    priors = {name: info.priors[kind] for name, info in CAUSES.items() if kind in info.priors}
    odds = {name: priors[name] * 10 ** weights[name] for name in priors.keys() & weights.keys()}
    unmeasured = sum(prior for name, prior in priors.items() if name not in weights)
    unknown = UNKNOWN_PRIOR * (sum(priors.values()) or 1.0)
    total = sum(odds.values()) + unmeasured + unknown
    return {name: each / total for name, each in odds.items()}


def unknown_share(likelihood_by_cause: Mapping[str, float]) -> float:
    return 1.0 - sum(likelihood_by_cause.values())
