"""From a deviation to a weight, and from weights to likelihoods. Weights are decimal logarithms."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from paceline_server.detect.causes.catalogue import CAUSES, UNKNOWN, UNKNOWN_PRIOR

# A value one and a half times what is no deviation says nothing; each further one says ten times
# more, up to a thousand to one: above that, the metric itself is the more doubtful. No deviation
# at all is thirty to one against: metrics miss some faults (a throttle between two samples).
_NEUTRAL_SCORE = 1.5
_STRONGEST = 3.0
_WEAKEST = -1.5
# Five to one for a change at the very time; up to a thousand to one against a distant one.
_AT_ONSET = 0.7
_LONG_BEFORE = -3.0
# What explains two thirds of the slowdown is neutral, a tenth fifty to one against.
_NEUTRAL_SHARE = 2 / 3
# Normal metrics of a cause speak against it, but not as loudly as the deviating one speaks for it.
AGREES = 0.3
DISAGREES = -0.5
# A cause that a deeper one brings about (swapping is memory pressure, a lost link makes errors) is
# not the answer while that one stands.
EXPLAINED_AWAY = -2.0
# From here on a check has ruled its cause out: ten to one.
RULED_OUT = -1.0


def of_strength(score: float) -> float:
    """`score`: deviation over what is no deviation."""
    return min(max(score - _NEUTRAL_SCORE, _WEAKEST), _STRONGEST)


def of_time(distance_seconds: float, tolerance_seconds: float) -> float:
    """`distance_seconds`: from the metric's change to the onset, 0 if it may be the same moment."""
    beyond = max(distance_seconds - tolerance_seconds, 0.0)
    return max(_AT_ONSET - beyond / tolerance_seconds, _LONG_BEFORE)


def of_magnitude(predicted: float, slowdown: float) -> float:
    """Ratios, 1: no slower. Explaining too much is forgiven: not all work depends on it."""
    if slowdown <= 1.0:
        return 0.0
    share = math.log(max(predicted, 1.0)) / math.log(slowdown)
    if share > 1.0:
        return max(0.5 - 0.2 * (share - 1.0), -0.5)
    return max(3.0 * share - 2.0, -2.0) if share < _NEUTRAL_SHARE else 1.5 * (share - 2 / 3)


def combined(weights: Iterable[float]) -> float:
    """Of several metrics of one cause: the strongest statement, and what most others add to it."""
    first, *others = sorted(weights, reverse=True)
    if first <= 0 or not others:
        return first
    agreeing = sum(weight > 0 for weight in others)
    if 2 * agreeing == len(others):
        return first
    return first + (AGREES if 2 * agreeing > len(others) else DISAGREES)


def likelihoods(weights: Mapping[str, float], kind: str) -> dict[str, float]:
    """Posterior of each cause that was measured; they sum to less than 1, the rest is unknown."""
    priors = {name: info.priors[kind] for name, info in CAUSES.items() if kind in info.priors}
    odds = {name: priors[name] * 10 ** weights[name] for name in priors.keys() & weights.keys()}
    unmeasured = sum(prior for name, prior in priors.items() if name not in weights)
    share = UNKNOWN_PRIOR * (sum(priors.values()) or 1.0)
    total = sum(odds.values()) + unmeasured + share
    return {name: each / total for name, each in odds.items()}


def unknown_share(found: Mapping[str, float]) -> float:
    return 1.0 - sum(found.values())


__all__ = [
    "RULED_OUT",
    "UNKNOWN",
    "combined",
    "likelihoods",
    "of_magnitude",
    "of_strength",
    "of_time",
    "unknown_share",
]
