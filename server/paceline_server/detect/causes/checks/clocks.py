"""SM and memory clock, and the reasons a GPU gives for holding its clock back.

A reason without a lower clock slows nothing: `sw_power_cap` is active on most busy GPUs. A lower
clock with a reason names the reason; without one it is the low clock itself (application clocks,
a driver's or an administrator's limit).
"""

from __future__ import annotations

from dataclasses import replace

from msgspec.structs import replace as replace_evidence

from paceline_server.detect.causes import weighing
from paceline_server.detect.causes.suspect import Scope, Suspect
from paceline_server.detect.causes.symptom import (
    MetricObservation,
    Symptom,
    inverse,
    look,
    together,
)

# Healthy clocks move by some percent (boost, temperature, the kernels that run).
SM_CLOCK = Symptom(
    "low SM clock", "DCGM_FI_DEV_SM_CLOCK", Scope.GPU, "SM clock", "MHz", "level",
    0.0, relative=0.03, rises=False, predicts=inverse,
)  # fmt: skip
MEMORY_CLOCK = Symptom(
    "low memory clock", "DCGM_FI_DEV_MEM_CLOCK", Scope.GPU, "memory clock", "MHz", "level",
    0.0, relative=0.02, rises=False, predicts=inverse,
)  # fmt: skip
TEMPERATURE = Symptom(
    "thermal throttle", "DCGM_FI_DEV_GPU_TEMP", Scope.GPU, "temperature", "°C", "level",
    5.0, normal=75.0,
)  # fmt: skip
_NANOSECONDS = 1e-9


def _reason(cause: str, reason: str) -> Symptom:
    return Symptom(
        cause, "paceline_gpu_throttle_reason", Scope.GPU, f"throttle reason {reason}", "flag",
        "level", 0.2, normal=0.0, labels=(("reason", reason),),
    )  # fmt: skip


def _violation(cause: str, metric: str, what: str) -> Symptom:
    return Symptom(
        cause, metric, Scope.GPU, what, "%", "rate", 0.05, scale=_NANOSECONDS, normal=0.0
    )


# Most specific first: the hardware's slowdown bit is set with the thermal and power bits as well.
REASONS: dict[str, tuple[Symptom, ...]] = {
    "thermal throttle": (
        _reason("thermal throttle", "hw_thermal_slowdown"),
        _reason("thermal throttle", "sw_thermal_slowdown"),
        _violation("thermal throttle", "DCGM_FI_DEV_THERMAL_VIOLATION", "time held back by heat"),
    ),
    "power throttle": (
        _reason("power throttle", "hw_power_brake"),
        _reason("power throttle", "sw_power_cap"),
        _violation(
            "power throttle", "DCGM_FI_DEV_POWER_VIOLATION", "time held back by the power limit"
        ),
        Symptom(
            "power throttle",
            "DCGM_FI_DEV_ENFORCED_POWER_LIMIT",
            Scope.GPU,
            "power limit",
            "W",
            "level",
            0.0,
            relative=0.03,
            rises=False,
        ),
    ),
    "hardware slowdown": (_reason("hardware slowdown", "hw_slowdown"),),
}
SYMPTOMS = (
    SM_CLOCK, MEMORY_CLOCK, TEMPERATURE, *(each for some in REASONS.values() for each in some)
)  # fmt: skip
_BEYOND_ONE_METRIC = 1.0  # a reason and the clock that follows from it, together


def check(suspect: Suspect) -> list[MetricObservation]:
    looks = []
    clock = look(suspect, SM_CLOCK)
    held_back = False
    for cause, symptoms in REASONS.items():
        told = [found for each in symptoms if (found := look(suspect, each)) is not None]
        if not told:
            continue
        best = max(told, key=lambda each: each.weight)
        found = _with_clock(cause, best, clock, held_back)
        if cause == "thermal throttle":
            found = _with_temperature(suspect, found)
        looks.append(found)
        held_back = held_back or found.weight > 0
    if clock is not None:
        lessened = weighing.EXPLAINED_AWAY if held_back else 0.0
        looks.append(replace(clock, weight=clock.weight + lessened))
    memory = look(suspect, MEMORY_CLOCK)
    return looks if memory is None else [*looks, memory]


def _with_clock(
    cause: str, reason: MetricObservation, clock: MetricObservation | None, held_back: bool
) -> MetricObservation:
    if reason.weight <= 0:
        weight = reason.weight if clock is None else reason.weight + min(clock.weight, 0.0)
        said = reason.evidence[0]
        text = f"no throttle reason speaks for a {cause}: {said.text}"
        return MetricObservation(cause, weight, (replace_evidence(said, text=text),))
    weight = reason.weight
    if clock is not None:
        fell = clock.weight > weighing.RULED_OUT  # by as little as it may: the GPU says so itself
        weight = clock.weight + (_BEYOND_ONE_METRIC if fell else 0.0)
    if held_back:
        weight += weighing.EXPLAINED_AWAY
    return MetricObservation(
        cause, weight, reason.evidence + (() if clock is None else clock.evidence)
    )


def _with_temperature(suspect: Suspect, found: MetricObservation) -> MetricObservation:
    """Never the cause by itself: it supports a thermal throttle or speaks against one."""
    heat = look(suspect, TEMPERATURE)
    if heat is None:
        return found
    if found.weight <= 0:
        return MetricObservation(found.cause, found.weight, found.evidence + heat.evidence)
    return (
        together(found.cause, [found, heat])
        if heat.weight > 0
        else replace(
            found, weight=found.weight + weighing.DISAGREES, evidence=found.evidence + heat.evidence
        )
    )
