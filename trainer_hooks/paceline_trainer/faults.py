"""Injected faults for runs with emulated kernels, as the demo and `paceline evaluate` use them.

`faults.json` in the node's directory has a list of faults. Each rank reads it at the start of each
step and applies its own; deleting the file removes them. Replace the file atomically, by rename.
`rank` is the global rank; `local_rank` instead selects the rank by its place on the node.

    {"kind": "slow_data", "rank": 5, "seconds": 0.4}         its data loader takes longer per step
    {"kind": "slow_compute", "rank": 5, "factor": 1.2}       its kernels take 1.2 times as long
    {"kind": "slow_link", "ranks": [1, 3], "seconds": 0.05}  each pipeline transfer between these
                                                             two takes longer
    {"kind": "gc", "rank": 5, "seconds": 0.1}                one garbage collection per step, over
                                                             a heap of many objects
    {"kind": "stall", "rank": 5, "seconds": 2, "id": "a"}    it sleeps once per id
    {"kind": "checkpoint_stall", "rank": 5, "seconds": 3}    each checkpoint blocks it longer
    {"kind": "noise", "rank": 5, "seconds": 0.02}            it uses the CPU before each kernel, for
                                                             a random time with this mean
    {"kind": "skip_collective", "rank": 5}                   it skips the gradient reduction: the
                                                             other ranks wait forever

Several faults of one kind add up. On a GPU, a pause of the host may overlap with kernels; here
`gc`, `stall` and `noise` always add to their time, within the forward or backward.
"""

from __future__ import annotations

import gc
import logging
import random
import time
from pathlib import Path
from typing import Literal

import msgspec

from paceline_trainer.settings import RankPlacement

_log = logging.getLogger(__name__)

FAULTS_FILE = "faults.json"
HEAP_OBJECTS = 200_000  # a collection takes about 5 ms for them

Kind = Literal[
    "slow_data",
    "slow_compute",
    "slow_link",
    "gc",
    "stall",
    "checkpoint_stall",
    "noise",
    "skip_collective",
]


class ConfiguredFault(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One entry of the file."""

    kind: Kind
    rank: int | None = None
    local_rank: int | None = None
    ranks: tuple[int, int] | None = None
    seconds: float = 0.0
    factor: float = 1.0
    id: str = ""


_decoder = msgspec.json.Decoder(list[ConfiguredFault])


class Faults:
    """The faults of one rank; the trainer calls the methods where they take effect."""

    def __init__(self, path: Path | None = None, rank: int = 0, local_rank: int = 0) -> None:
        """`path`: the file; None: no faults."""
        self.path = path
        self.rank = rank
        self.local_rank = local_rank
        self.present: list[ConfiguredFault] = []  # faults that apply to this rank
        self._logged_error = ""
        self._stalled: set[str] = set()
        self._pauses: list[ConfiguredFault] = []  # pauses of this step that are still to come
        self._heap: list[list[object]] = []
        self._chance = random.Random(rank)

    @classmethod
    def on(cls, place: RankPlacement) -> Faults:
        directory = place.node_directory
        path = None if directory is None else directory / FAULTS_FILE
        return cls(path, place.rank, place.local_rank)

    def read(self) -> None:
        """Read the file; called at the start of a step."""
        if self.path is None:
            return
        self.present = [fault for fault in self._read(self.path) if self._concerns(fault)]
        if not any(fault.kind == "gc" for fault in self.present):
            self._heap.clear()
        self._pauses = [
            fault
            for fault in self.present
            if fault.kind == "gc" or (fault.kind == "stall" and fault.id not in self._stalled)
        ]

    def before_batch(self) -> None:
        self.read()
        _sleep(self._seconds("slow_data"))

    def before_kernel(self) -> None:
        while self._pauses:
            fault = self._pauses.pop()
            if fault.kind == "gc":
                _collect_garbage(self._heap, fault.seconds)
            else:
                self._stalled.add(fault.id)
                _sleep(fault.seconds)
        if mean := self._seconds("noise"):
            _burn(self._chance.expovariate(1 / mean))

    def kernel_factor(self) -> float:
        factor = 1.0
        for fault in self.present:
            if fault.kind == "slow_compute":
                factor *= fault.factor
        return factor

    def after_receive(self, peer: int) -> None:
        """Delay the end of a receive, because a transfer ends when its receiver leaves it."""
        for fault in self.present:
            if fault.kind == "slow_link" and fault.ranks is not None and peer in fault.ranks:
                _sleep(fault.seconds)

    def skips_collective(self) -> bool:
        return any(fault.kind == "skip_collective" for fault in self.present)

    def at_checkpoint(self) -> None:
        _sleep(self._seconds("checkpoint_stall"))

    def _seconds(self, kind: Kind) -> float:
        return sum(fault.seconds for fault in self.present if fault.kind == kind)

    def _concerns(self, fault: ConfiguredFault) -> bool:
        if fault.ranks is not None:
            return self.rank in fault.ranks
        return self.rank == fault.rank or self.local_rank == fault.local_rank

    def _read(self, path: Path) -> list[ConfiguredFault]:
        """Return the faults in the file; none if it is not valid, which is logged once."""
        try:
            return _decoder.decode(path.read_bytes())
        except OSError:
            self._logged_error = ""
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            if str(error) != self._logged_error:
                self._logged_error = str(error)
                _log.warning("%s is ignored, it is not valid: %s.", path, error)
        return []


def _sleep(seconds: float) -> None:
    if seconds > 0:
        time.sleep(seconds)


def _collect_garbage(heap: list[list[object]], seconds: float) -> None:
    """Collect garbage for `seconds`, over a heap of HEAP_OBJECTS."""
    if not heap:
        heap += ([] for _ in range(HEAP_OBJECTS))
    deadline = time.perf_counter() + seconds
    while time.perf_counter() < deadline:
        cycle: list[object] = []
        cycle.append(cycle)
        gc.collect()


def _burn(seconds: float) -> None:
    deadline = time.perf_counter() + seconds
    while time.perf_counter() < deadline:
        sum(range(1000))
