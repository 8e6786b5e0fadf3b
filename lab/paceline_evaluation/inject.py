"""Inject faults into real processes: through emulated GPUs, the trainer's `faults.json`, and
signals."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
from collections.abc import Callable, Iterable
from typing import Any

from paceline_demo.cluster import Cluster, EmulatedNode
from paceline_demo.faults import THERMAL_SLOWDOWN, THROTTLED_CELSIUS
from paceline_evaluation.faults import TrialFault
from paceline_trainer.faults import FAULTS_FILE

FATAL = frozenset({"hang", "crash"})
UNEVEN_MAGNITUDE = 0.3  # stages of 2 and 4 layers, lengths of 1 to 3: 30% and more of the step
_MAXIMUM_CLOCK_MHZ = 1980
_STEP_SECONDS = 0.2  # approximate step time of the job

RemoveFaults = Callable[[], None]


def inject(
    kind: str,
    cluster: Cluster,
    ranks: list[dict[str, Any]],
    onset_step: int,
    chance: random.Random,
) -> tuple[tuple[TrialFault, ...], RemoveFaults]:
    """Inject faults of a kind. Return the faults and a function that removes them."""
    injector = _Injector(cluster, ranks, onset_step, chance)
    faults = injector.inject(kind)
    return faults, injector.remove


class _Injector:
    def __init__(
        self,
        cluster: Cluster,
        ranks: list[dict[str, Any]],
        onset_step: int,
        chance: random.Random,
    ) -> None:
        self.cluster, self.onset_step, self.chance = cluster, onset_step, chance
        self.ranks = {rank["rank"]: rank for rank in ranks}
        self.written: dict[int, list[dict[str, Any]]] = {}  # by node: entries of its faults file
        self.throttled: list[tuple[EmulatedNode, int]] = []

    def inject(self, kind: str) -> tuple[TrialFault, ...]:
        rank = self.chance.choice(sorted(self.ranks))
        match kind:
            case "slow_rank":
                faults: tuple[TrialFault, ...] = (self._slow_rank(rank),)
            case "slow_node":
                faults = (self._slow_node(self._node(rank)),)
            case "two_faults":
                other = self.chance.choice(self._on_other_nodes(rank))
                faults = (self._slow_rank(rank), self._slow_data(other))
            case "data_stall":
                faults = (self._slow_data(rank),)
            case "slow_link":
                faults = (self._slow_link(),)
            case "gc":
                faults = (self._gc(),)
            case "transient_stall":
                faults = (self._stall(rank),)
            case "hang":
                faults = (self._signalled(kind, rank, signal.SIGSTOP),)
            case "crash":
                faults = (self._signalled(kind, rank, signal.SIGKILL),)
            case _:
                raise ValueError(f"{kind} cannot be injected into a running job")
        self._write()
        return faults

    def remove(self) -> None:
        for node in self.cluster.nodes:
            (node.directory / FAULTS_FILE).unlink(missing_ok=True)
        for node, gpu in self.throttled:
            if node.gpus is not None:
                node.gpus.reset(gpu)

    def _node(self, rank: int) -> EmulatedNode:
        return self.cluster.nodes[int(self.ranks[rank]["node"].removeprefix("node-"))]

    def _on(self, node: EmulatedNode) -> list[int]:
        return [rank for rank in sorted(self.ranks) if self._node(rank) is node]

    def _on_other_nodes(self, rank: int) -> list[int]:
        return [other for other in sorted(self.ranks) if self._node(other) is not self._node(rank)]

    def _slow_rank(self, rank: int) -> TrialFault:
        """Slow a rank: its GPU throttles, which NVML shows, or it is slow without visible cause."""
        magnitude = self.chance.uniform(0.15, 0.5)
        node = self._node(rank)
        visible = node.gpus is not None and self.chance.random() < 0.5
        if visible:
            self._throttle(node, self.ranks[rank]["local_rank"], magnitude)
        else:
            self._add_entry(node, kind="slow_compute", rank=rank, factor=1.0 + magnitude)
        return TrialFault(
            "slow_rank",
            self.onset_step,
            magnitude,
            ranks=(rank,),
            node=node.number,
            cause="thermal" if visible else "unknown",
        )

    def _slow_node(self, node: EmulatedNode) -> TrialFault:
        magnitude, ranks = self.chance.uniform(0.2, 0.5), self._on(node)
        visible = node.gpus is not None
        for rank in ranks:
            if visible:
                self._throttle(node, self.ranks[rank]["local_rank"], magnitude)
            else:
                self._add_entry(node, kind="slow_compute", rank=rank, factor=1.0 + magnitude)
        cause = "thermal" if visible else "unknown"
        return TrialFault(
            "slow_node",
            self.onset_step,
            magnitude,
            ranks=tuple(ranks),
            node=node.number,
            cause=cause,
        )

    def _throttle(self, node: EmulatedNode, gpu: int, magnitude: float) -> None:
        assert node.gpus is not None
        node.gpus.set(
            gpu,
            sm_clock_mhz=round(_MAXIMUM_CLOCK_MHZ / (1.0 + magnitude)),
            temperature_celsius=THROTTLED_CELSIUS,
            throttle_reasons=THERMAL_SLOWDOWN,
        )
        self.throttled.append((node, gpu))

    def _slow_data(self, rank: int) -> TrialFault:
        magnitude = self.chance.uniform(0.2, 0.6)
        node = self._node(rank)
        self._add_entry(node, kind="slow_data", rank=rank, seconds=magnitude * _STEP_SECONDS)
        return TrialFault("data_stall", self.onset_step, magnitude, ranks=(rank,), node=node.number)

    def _slow_link(self) -> TrialFault:
        """Slow the link between a rank of the first stage and its peer of the second."""
        half = len(self.ranks) // 2
        source = self.chance.randrange(half)
        link = (source, source + half)
        magnitude = self.chance.uniform(0.2, 0.5)
        for rank in link:
            self._add_entry(
                self._node(rank),
                kind="slow_link",
                ranks=list(link),
                seconds=magnitude * _STEP_SECONDS / 4,
            )
        node = self._node(source).number
        return TrialFault("slow_link", self.onset_step, magnitude, node=node, link=link)

    def _gc(self) -> TrialFault:
        for rank in self.ranks:
            self._add_entry(self._node(rank), kind="gc", rank=rank, seconds=0.04)
        return TrialFault("gc", self.onset_step, 0.2)

    def _stall(self, rank: int) -> TrialFault:
        node = self._node(rank)
        name = f"{self.onset_step}"
        self._add_entry(node, kind="stall", rank=rank, seconds=5 * _STEP_SECONDS, id=name)
        return TrialFault(
            "transient_stall", self.onset_step, 5.0, steps=1, ranks=(rank,), node=node.number
        )

    def _signalled(self, kind: str, rank: int, number: signal.Signals) -> TrialFault:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.ranks[rank]["pid"], number)
        node = self._node(rank).number
        return TrialFault(kind, self.onset_step, 1.0, ranks=(rank,), node=node, cause="host")

    def _add_entry(self, node: EmulatedNode, **entry: object) -> None:
        self.written.setdefault(node.number, []).append(entry)

    def _write(self) -> None:
        for number, entries in self.written.items():
            path = self.cluster.nodes[number].directory / FAULTS_FILE
            whole = path.with_suffix(".new")
            whole.write_text(json.dumps(_unique(entries)))
            whole.replace(path)


def _unique(entries: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the entries without duplicates: both ends of a link may be on one node."""
    result: list[dict[str, Any]] = []
    for entry in entries:
        if entry not in result:
            result.append(entry)
    return result
