"""The interface of a collector: its base class, its context and its result.

A collector is a class with a name, an interval and `collect`. It is created once, keeps its file
descriptors open, and is called from one thread at a time, never from the event loop's thread. A
value that cannot be read is left out; it is never 0 or -1.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import ClassVar

import msgspec

from paceline_agent.collect.blocks import SeriesBlock, each
from paceline_agent.collect.visible_gpus import visible_gpu
from paceline_wire.batch import CollectorEvent, DeviceEvent, GpuInfo, Sample

BEYOND_COUNTERS = (1 << 63) - 1  # some drivers return larger values for -1: no value


class CollectorUnavailable(Exception):  # noqa: N818 - a state, not a fault
    """Nothing to collect at present (no driver, no device); the message is one sentence.

    The runner reports it once and tries again less often.
    """


_METRIC_TYPES = {"gauge", "counter", "info", "unknown"}
METRIC_ENDINGS = {"counter": "_total", "info": "_info"}  # OpenMetrics: sample names only


@dataclass(frozen=True, slots=True)
class Metric:
    """A metric that a collector emits, as /metrics describes it.

    `name` may contain `*` for any text; the most specific name wins. `type` is OpenMetrics' type.
    A counter of other exporters whose name does not end in `_total` is `unknown`, because
    OpenMetrics accepts no other counters. `unit` is None for a count, a state or a share.
    Raises ValueError for an unknown type or a name without the ending of its type.
    """

    name: str
    type: str
    unit: str | None
    help: str

    def __post_init__(self) -> None:
        if self.type not in _METRIC_TYPES:
            expected = ", ".join(sorted(_METRIC_TYPES))
            raise ValueError(f"{self.name}: expected one of {expected}, got {self.type!r}")
        if not self.name.endswith(METRIC_ENDINGS.get(self.type, "")):
            ending = METRIC_ENDINGS[self.type]
            raise ValueError(f"the name of a {self.type} ends in {ending}, got {self.name}")

    @property
    def family(self) -> str:
        """The name without the ending that OpenMetrics has on samples only."""
        return self.name.removesuffix(METRIC_ENDINGS.get(self.type, ""))

    @property
    def suffix_unit(self) -> str:
        """The unit if the name ends in it, as OpenMetrics requires of a unit; otherwise empty."""
        return self.unit if self.unit and self.family.endswith(f"_{self.unit}") else ""


@dataclass(frozen=True, slots=True)
class LocalRank:
    """A rank whose process is currently running on this node."""

    job: str
    generation: int
    rank: int  # global
    local_rank: int
    pid: int
    gpu_index: int | None = None  # NVML index
    gpu_uuid: str | None = None


class Inventory:
    """GPUs of the node as last reported by a collector; written by the runner only.

    `gpu_of_pid`: index of the GPU that a rank's process computes on, as listed by the driver.
    """

    def __init__(self) -> None:
        self.gpus: tuple[GpuInfo, ...] = ()
        self.gpu_of_pid: Mapping[int, int] = {}


def no_ranks() -> Sequence[LocalRank]:
    return ()


@dataclass(frozen=True, slots=True)
class Context:
    """The constructor argument of every collector.

    `local_ranks` returns a snapshot, because it is called from other threads than the event loop's.
    """

    node_directory: Path
    sysfs_root: Path = Path("/sys")
    procfs_root: Path = Path("/proc")
    kmsg_path: Path = Path("/dev/kmsg")
    replays_kmsg: bool = False  # report messages from before the start too
    nccl_inspector_directory: Path | None = None  # in addition to the directories of the ranks
    hostname: str = ""
    excluded_rdma: frozenset[str] = frozenset()  # "mlx5_1", "mlx5_1/1", "mlx5_bond_*": never opened
    local_ranks: Callable[[], Sequence[LocalRank]] = no_ranks
    inventory: Inventory = field(default_factory=Inventory)

    def gpu_of(self, rank: LocalRank) -> GpuInfo | None:
        """Return a rank's GPU: by its process in the driver, its own report, or its environment."""
        gpus = self.inventory.gpus
        listed = self.inventory.gpu_of_pid.get(rank.pid, rank.gpu_index)
        for gpu in gpus:
            if gpu.index == listed or (listed is None and gpu.uuid == rank.gpu_uuid):
                return gpu
        return visible_gpu(gpus, self.procfs_root, rank.pid, rank.local_rank)

    def excludes_rdma(self, name: str) -> bool:
        """Return whether a device, or a port such as `mlx5_1/1`, must not be opened."""
        return any(fnmatchcase(name, pattern) for pattern in self.excluded_rdma)


class Collected(msgspec.Struct, frozen=True):
    """The result of one call.

    `gpus` and `gpu_of_pid` (see Inventory) are None unless the collector determined them.

    `samples` are current values; /metrics shows those of the last call only. Many samples that are
    collected together form a `SeriesBlock`. `lasting` values rarely change: they are shown until a
    later call returns another list or fails; None means that nothing changed. `more`: the next call
    would return more of the same backlog (such as a long log). The runner sets `collector`.
    """

    samples: Sequence[Sample | SeriesBlock] = ()
    lasting: Sequence[Sample | SeriesBlock] | None = None
    events: list[DeviceEvent | CollectorEvent] = []
    gpus: list[GpuInfo] | None = None
    gpu_of_pid: dict[int, int] | None = None
    more: bool = False
    collector: str = ""

    def everything(self) -> list[Sample]:
        return [*each(self.samples), *each(self.lasting or ())]


class Collector(ABC):
    """Base class of all collectors.

    A call that exceeds `deadline_seconds` (at most 4, so that it is reported within 5) counts as
    hung. `series_at_most` limits the result of a call; the rest is dropped and counted. `metrics`
    describes every metric that the collector emits. An `isolated` collector runs in a child
    process, because its calls can block where no signal reaches them; its `local_ranks` are those
    at the time of the call, and its inventory is empty.
    """

    name: ClassVar[str]
    interval_seconds: ClassVar[float]
    metrics: ClassVar[tuple[Metric, ...]] = ()
    deadline_seconds: ClassVar[float] = 3.0
    series_at_most: ClassVar[int] = 2000
    isolated: ClassVar[bool] = False

    def __init__(self, context: Context) -> None:
        self.context = context

    @abstractmethod
    def collect(self, now_ns: int) -> Collected:
        """Read everything once.

        Args:
            now_ns: CLOCK_REALTIME, the time of the samples.

        Raises:
            CollectorUnavailable: there is nothing to read.
        """

    def close(self) -> None:  # noqa: B027 - most collectors have nothing to close
        """Close open files and handles."""
