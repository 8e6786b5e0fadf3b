"""The telemetry kept for causes: cost per sample, memory for 10,240 GPUs, time of a diagnosis.

Nodes of 8 GPUs, 10 ports and 8 ranks, with every metric that is kept, for ten minutes at one sample
in five seconds. A quarter of the series change all the time, the rest never.
Memory is measured on 64 nodes, in a process of its own, and scaled.
"""

from __future__ import annotations

import random
import resource
from collections.abc import Iterator
from statistics import median
from time import process_time_ns

from benchmarks.harness import Result
from paceline_server.detect.causes.diagnosis import diagnose
from paceline_server.detect.observation import Generation, Observation
from paceline_server.detect.telemetry import STORED_METRICS, Telemetry
from paceline_server.steps.groups import Groups
from paceline_wire.batch import Sample
from paceline_wire.topology import Topology

NODES, ALL_NODES, GPUS, PORTS = 64, 1280, 8, 10
SWEEPS, SECONDS = 120, 5
START_NS = 1_700_000_000_000_000_000
_MOVES = ("CLOCK", "TEMP", "UTIL", "pressure", "disk", "wait", "cnp", "switches")


def measure() -> Iterator[Result]:
    telemetry, chance = Telemetry(), random.Random(1)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    spent = samples = 0
    for sweep in range(SWEEPS):
        for node in range(NODES):
            swept = list(_sweep(node, START_NS + sweep * SECONDS * 10**9, chance))
            started = process_time_ns()
            telemetry.extend(f"node-{node}", swept)
            spent += process_time_ns() - started
            samples += len(swept)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    yield Result(
        "telemetry: samples taken in", samples / spent * 1e9, "samples/CPU s", goal=1e6,
        more_is_better=True,
    )  # fmt: skip
    yield Result("telemetry of 10,240 GPUs", grown / 1024 / NODES * ALL_NODES, "MiB", goal=1024)
    yield Result("diagnosis in 512 ranks", _diagnosis(telemetry), "CPU ms", goal=20)


def _sweep(node: int, time_ns: int, chance: random.Random) -> Iterator[Sample]:
    for name, labels in STORED_METRICS.items():
        for number, place in enumerate(_places(labels, node)):
            moves = any(word in name for word in _MOVES)
            is_counter = name.endswith(("_total", "TOTAL", "VIOLATION"))
            grown = (time_ns - START_NS) / 1e9 if is_counter else 0.0
            value = (100.0 + number + grown + chance.random()) if moves else 1.0
            yield Sample(name, place, value, time_ns)


def _places(labels: tuple[str, ...], node: int) -> list[dict[str, str]]:
    if "rank" in labels:
        kind = {"kind": "involuntary"} if "kind" in labels else {}
        ranks = range(node * GPUS, (node + 1) * GPUS)
        return [{"job": "bench", "rank": str(rank), **kind} for rank in ranks]
    if "reason" in labels:
        reasons = ("hw_thermal_slowdown", "sw_thermal_slowdown", "sw_power_cap", "hw_slowdown")
        return [{"gpu": str(gpu), "reason": each} for gpu in range(GPUS) for each in reasons]
    if "gpu" in labels:
        return [{"gpu": str(gpu), "UUID": "GPU-x", "modelName": "H200"} for gpu in range(GPUS)]
    if "port" in labels:
        return [{"device": f"mlx5_{port}", "port": "1"} for port in range(PORTS)]
    return [dict.fromkeys(labels, "one")]


def _diagnosis(telemetry: Telemetry) -> float:
    world = NODES * GPUS
    generation = Generation(
        job="bench",
        number=0,
        topology=Topology(world, 1, 1),
        nodes={rank: f"node-{rank // GPUS}" for rank in range(world)},
        gpus={rank: rank % GPUS for rank in range(world)},
        started_ns=START_NS,
    )
    seen = Observation(
        now_ns=START_NS,
        steps=[],
        exits=[],
        device_events=[],
        ranks={},
        last_seen_ns={},
        exited={},
        losses={},
        telemetry=telemetry,
        groups=Groups(world),
    )
    onset_ns = START_NS + (SWEEPS - 10) * SECONDS * 10**9
    taken = []
    for rank in range(0, world, 16):
        started = process_time_ns()
        diagnose(rank, onset_ns, 100, seen, generation, slowdown=1.5)
        taken.append(process_time_ns() - started)
    return median(taken) / 1e6
