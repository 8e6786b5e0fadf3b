"""What a collector is, what it is given and what it gives back.

A collector is a class with a name, an interval and `collect`. It is made once, keeps its file
descriptors open, and is called from one thread at a time that is not the event loop's. A value
it cannot read is left out: never 0, never -1.
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

BEYOND_COUNTERS = (1 << 63) - 1  # none gets there: -1 and the like of a driver that has none


class CollectorUnavailable(Exception):  # noqa: N818 - a state, not a fault
    """There is nothing to collect here at present (no driver, no device). One sentence says why.

    The runner reports it once and asks again, less often.
    """


_METRIC_TYPES = {"gauge", "counter", "info", "unknown"}
METRIC_ENDINGS = {"counter": "_total", "info": "_info"}  # OpenMetrics: of the samples only


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
    """A rank whose process runs on this node now."""

    job: str
    generation: int
    rank: int  # global
    local_rank: int
    pid: int
    gpu_index: int | None = None  # NVML index
    gpu_uuid: str | None = None


class Inventory:
    """What the node holds, as last reported by a collector. The runner writes, anyone reads.

    `gpu_of_pid`: index of the GPU that a rank's process computes on, as the driver told it.
    """

    def __init__(self) -> None:
        self.gpus: tuple[GpuInfo, ...] = ()
        self.gpu_of_pid: Mapping[int, int] = {}


def no_ranks() -> Sequence[LocalRank]:
    return ()


@dataclass(frozen=True, slots=True)
class Context:
    """What every collector is made with.

    `local_ranks` is called from other threads than the event loop's: it returns a snapshot.
    """

    node_directory: Path
    sysfs_root: Path = Path("/sys")
    procfs_root: Path = Path("/proc")
    kmsg_path: Path = Path("/dev/kmsg")
    replays_kmsg: bool = False  # what was in the log before is told as well
    nccl_inspector_directory: Path | None = None  # besides those the ranks name
    hostname: str = ""
    excluded_rdma: frozenset[str] = frozenset()  # "mlx5_1", "mlx5_1/1", "mlx5_bond_*": never opened
    local_ranks: Callable[[], Sequence[LocalRank]] = no_ranks
    inventory: Inventory = field(default_factory=Inventory)

    def gpu_of(self, rank: LocalRank) -> GpuInfo | None:
        """As the driver lists its process, else as the rank told it or its environment does."""
        gpus = self.inventory.gpus
        listed = self.inventory.gpu_of_pid.get(rank.pid, rank.gpu_index)
        for gpu in gpus:
            if gpu.index == listed or (listed is None and gpu.uuid == rank.gpu_uuid):
                return gpu
        return visible_gpu(gpus, self.procfs_root, rank.pid, rank.local_rank)

    def excludes_rdma(self, name: str) -> bool:
        """Whether a device, or a port written `mlx5_1/1`, is to be left alone."""
        return any(fnmatchcase(name, pattern) for pattern in self.excluded_rdma)


class Collected(msgspec.Struct, frozen=True):
    """What one call brought. `gpus` is None unless the collector knows the node's GPUs; so is
    `gpu_of_pid` (see Inventory), also where it was not looked up this time.

    `samples` hold current values: /metrics shows those of the last call and no others; the
    many that come together each time are a `SeriesBlock`. `lasting` is for what rarely changes:
    it is shown until a later call brings another list, or fails; None says that nothing changed.
    `more`: another call right away would bring more of the same backlog (a log being read).
    `collector` is filled in by the runner.
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
    """Base of all collectors.

    `deadline_seconds` is when a call counts as hung; at most 4, so that it is told within 5.
    `series_at_most` bounds what one call may bring: the rest is left out and counted. An
    `isolated` collector lives in a child process, because its calls can block where no signal
    reaches them; there `local_ranks` is as of the call, and the inventory is empty.
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
        """Read everything once; `now_ns` is CLOCK_REALTIME and stamps the samples.

        Raises CollectorUnavailable where there is nothing to read.
        """

    def close(self) -> None:  # noqa: B027 - most collectors hold nothing worth closing
        """Let go of what it holds open."""
