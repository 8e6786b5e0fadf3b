"""SM clock, memory clock and throttle reasons of the GPU.

A throttle reason without a lower clock has no effect: `sw_power_cap` is active on most busy GPUs.
For a lower clock with a reason, the cause is the reason. Without one it is the low clock itself
(application clocks, or a limit set by the driver or an administrator).
"""

from __future__ import annotations

from dataclasses import replace

from msgspec.structs import replace as replace_evidence

from paceline_server.detect.causes import weighing
from paceline_server.detect.causes.catalog import (
    HARDWARE_SLOWDOWN,
    LOW_MEMORY_CLOCK,
    LOW_SM_CLOCK,
    POWER_THROTTLE,
    THERMAL_THROTTLE,
)
from paceline_server.detect.causes.suspect import Scope, Suspect
from paceline_server.detect.causes.symptom import (
    Symptom,
    WeighedEvidence,
    combine,
    inverse,
    weigh_symptom,
)
from paceline_wire import metric_names

# Healthy clocks vary by a few percent (boost, temperature, the running kernels).
SM_CLOCK = Symptom(
    LOW_SM_CLOCK, metric_names.SM_CLOCK, Scope.GPU, "SM clock", "MHz", "level",
    0.0, relative_tolerance=0.03, rises=False, predicts=inverse,
)  # fmt: skip
MEMORY_CLOCK = Symptom(
    LOW_MEMORY_CLOCK, metric_names.MEM_CLOCK, Scope.GPU, "memory clock", "MHz", "level",
    0.0, relative_tolerance=0.02, rises=False, predicts=inverse,
)  # fmt: skip
TEMPERATURE = Symptom(
    THERMAL_THROTTLE, metric_names.GPU_TEMP, Scope.GPU, "temperature", "°C", "level",
    5.0, normal=75.0,
)  # fmt: skip
_NANOSECONDS = 1e-9


def _reason(cause: str, reason: str) -> Symptom:
    return Symptom(
        cause, metric_names.GPU_THROTTLE_REASON, Scope.GPU, f"throttle reason {reason}", "flag",
        "level", 0.2, normal=0.0, labels=(("reason", reason),),
    )  # fmt: skip


def _violation(cause: str, metric: str, what: str) -> Symptom:
    return Symptom(
        cause, metric, Scope.GPU, what, "%", "rate", 0.05, scale=_NANOSECONDS, normal=0.0
    )


# Most specific first: the hardware slowdown bit is also set with the thermal and power bits.
THROTTLE_REASONS: dict[str, tuple[Symptom, ...]] = {
    THERMAL_THROTTLE: (
        _reason(THERMAL_THROTTLE, "hw_thermal_slowdown"),
        _reason(THERMAL_THROTTLE, "sw_thermal_slowdown"),
        _violation(
            THERMAL_THROTTLE, metric_names.GPU_THERMAL_VIOLATION, "share of time throttled for heat"
        ),
    ),
    POWER_THROTTLE: (
        _reason(POWER_THROTTLE, "hw_power_brake"),
        _reason(POWER_THROTTLE, "sw_power_cap"),
        _violation(
            POWER_THROTTLE, metric_names.GPU_POWER_VIOLATION, "share of time throttled for power"
        ),
        Symptom(
            POWER_THROTTLE,
            metric_names.GPU_ENFORCED_POWER_LIMIT,
            Scope.GPU,
            "power limit",
            "W",
            "level",
            0.0,
            relative_tolerance=0.03,
            rises=False,
        ),
    ),
    HARDWARE_SLOWDOWN: (_reason(HARDWARE_SLOWDOWN, "hw_slowdown"),),
}
SYMPTOMS = (
    SM_CLOCK,
    MEMORY_CLOCK,
    TEMPERATURE,
    *(symptom for symptoms in THROTTLE_REASONS.values() for symptom in symptoms),
)
_REASON_AND_CLOCK = 1.0  # added if both the throttle reason and the clock deviate


def check(suspect: Suspect) -> list[WeighedEvidence]:
    results = []
    clock = weigh_symptom(suspect, SM_CLOCK)
    is_throttled = False
    for cause, symptoms in THROTTLE_REASONS.items():
        reasons = [
            weighed
            for symptom in symptoms
            if (weighed := weigh_symptom(suspect, symptom)) is not None
        ]
        if not reasons:
            continue
        strongest = max(reasons, key=lambda weighed: weighed.weight)
        result = _with_clock(cause, strongest, clock, is_throttled)
        if cause == THERMAL_THROTTLE:
            result = _with_temperature(suspect, result)
        results.append(result)
        is_throttled = is_throttled or result.weight > 0
    if clock is not None:
        explained = weighing.EXPLAINED_AWAY if is_throttled else 0.0
        results.append(replace(clock, weight=clock.weight + explained))
    memory = weigh_symptom(suspect, MEMORY_CLOCK)
    return results if memory is None else [*results, memory]


def _with_clock(
    cause: str, reason: WeighedEvidence, clock: WeighedEvidence | None, is_throttled: bool
) -> WeighedEvidence:
    if reason.weight <= 0:
        weight = reason.weight if clock is None else reason.weight + min(clock.weight, 0.0)
        line = reason.evidence[0]
        text = f"no throttle reason indicates a {cause}: {line.text}"
        return WeighedEvidence(cause, weight, (replace_evidence(line, text=text),))
    weight = reason.weight
    if clock is not None:
        fell = (
            clock.weight > weighing.RULED_OUT
        )  # a small drop is enough, because the GPU itself reports the reason
        weight = clock.weight + (_REASON_AND_CLOCK if fell else 0.0)
    if is_throttled:
        weight += weighing.EXPLAINED_AWAY
    return WeighedEvidence(
        cause, weight, reason.evidence + (() if clock is None else clock.evidence)
    )


def _with_temperature(suspect: Suspect, throttle: WeighedEvidence) -> WeighedEvidence:
    """Add the temperature, which supports a thermal throttle or speaks against it."""
    heat = weigh_symptom(suspect, TEMPERATURE)
    if heat is None:
        return throttle
    evidence = throttle.evidence + heat.evidence
    if throttle.weight <= 0:
        return replace(throttle, evidence=evidence)
    if heat.weight > 0:
        return combine(throttle.cause, [throttle, heat])
    return replace(throttle, weight=throttle.weight + weighing.DISAGREES, evidence=evidence)
