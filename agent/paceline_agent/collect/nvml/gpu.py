"""One GPU with its labels and the calls that it does not support."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from paceline_agent.collect.blocks import Recurring, SeriesBlock
from paceline_agent.collect.gpus import gpu_labels
from paceline_agent.collect.nvml.driver import GONE, NO_VALUES, UNSUPPORTED, pynvml
from paceline_agent.collect.nvml.fields import FieldReading, Fields
from paceline_wire.batch import DeviceEvent, GpuInfo


class Value(NamedTuple):
    """One number.

    `extra`: labels in addition to the GPU's index and UUID; None: all labels of the GPU.
    """

    name: str
    number: float
    extra: tuple[tuple[str, str], ...] | None = None


Trouble = Literal["lost", "hung"]
Reading = Callable[[Any], Iterable[Value]]


@dataclass(slots=True, eq=False)
class NvmlGpu:
    """One GPU; without a handle it could not be identified.

    Used by one thread at a time, the one that reads it. On a faulty GPU its call may never return.
    """

    index: int
    fast_fields: Fields
    slow_fields: Fields
    handle: Any = None
    info: GpuInfo | None = None
    labels: dict[str, str] = field(default_factory=dict)
    refused: set[object] = field(default_factory=set)  # calls that it does not support
    links: Any = None  # links.Links, after the first read
    activity: Any = None  # activity.Activity, after the first read
    mig_mode: int | None = None
    is_ours: bool = True  # False: this container may not use the GPU
    trouble: Trouble | None = None  # reported once, until it responds again
    troubled_ns: int = 0  # when `trouble` last changed
    answered: bool = False  # whether any call succeeded since `begin`
    last_error: Exception | None = None
    reports_xids: bool = False  # NVML accepted the GPU for XID events
    last_xid: int | None = None
    xid_counts: dict[int, int] = field(default_factory=dict)
    rank_bytes: dict[int, int] = field(default_factory=dict)  # memory that ranks use, by their pid
    occupants: Any = None  # occupants.Occupants, after the first read
    recurring: Recurring = field(default_factory=Recurring)  # blocks of each sweep
    lasting: Recurring = field(default_factory=Recurring)

    def name(self, info: GpuInfo, hostname: str) -> None:
        if self.info is not None and self.info.uuid != info.uuid:  # the GPU was renumbered
            self.trouble = None
            self.last_xid = None
            self.xid_counts.clear()
        self.info = info
        self.labels = gpu_labels(info, hostname)

    def begin(self) -> None:
        self.answered = False
        self.last_error = None

    def ask(self, call: Callable[[Any], Any]) -> Any:
        """Return the result; None if it is not supported (not called again) or failed this time.

        Raises NVMLError if the GPU as a whole does not respond.
        """
        if call in self.refused:
            return None
        try:
            answer = call(self.handle)
        except UNSUPPORTED:
            self.refused.add(call)
            self.answered = True
            return None
        except GONE:
            raise
        except pynvml.NVMLError as error:
            self.last_error = error
            return None
        self.answered = True
        return answer

    def read(self, readings: Iterable[Reading]) -> Iterable[Value]:
        for reading in readings:
            for value in self.ask(reading) or ():
                if value.number not in NO_VALUES:
                    yield value

    def forget_refusals(self) -> None:
        """Call everything again: a reloaded driver or another MIG mode may support more."""
        self.refused.clear()
        self.fast_fields.reset()
        self.slow_fields.reset()
        self.links = None
        self.activity = None
        self.occupants = None

    def block(
        self, recurring: Recurring, values: Sequence[Value | FieldReading], now_ns: int
    ) -> SeriesBlock:
        names, extras = [value[0] for value in values], [value[2] for value in values]
        return recurring.block(
            (names, extras, self.labels),
            lambda: list(zip(names, map(self._with, extras), strict=True)),
            [float(value[1]) for value in values],
            now_ns,
        )

    def _with(self, extra: tuple[tuple[str, str], ...] | None) -> dict[str, str]:
        if extra is None:
            return self.labels
        return {"gpu": self.labels["gpu"], "UUID": self.labels["UUID"], **dict(extra)}

    def event(self, kind: str, detail: str, now_ns: int) -> DeviceEvent:
        return DeviceEvent(time_ns=now_ns, kind=kind, device=f"gpu{self.index}", detail=detail)
