"""One GPU and what has been learnt of it: its labels, and the calls it does not support."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from paceline_agent.nvml.driver import GONE, UNSUPPORTED, pynvml
from paceline_agent.nvml.fields import Answer, Fields
from paceline_wire.batch import DeviceEvent, GpuInfo, Sample


class Value(NamedTuple):
    """One number. `extra` are labels beside the GPU's index and UUID; None: all of its labels."""

    name: str
    number: float
    extra: tuple[tuple[str, str], ...] | None = None


Trouble = Literal["lost", "hung"]
Reading = Callable[[Any], Iterable[Value]]


@dataclass(slots=True, eq=False)
class Gpu:
    """Without a handle it could not even be identified.

    Used by one thread at a time: the one that reads it, which on a sick GPU may never come back.
    """

    index: int
    fast_fields: Fields
    slow_fields: Fields
    handle: Any = None
    info: GpuInfo | None = None
    labels: dict[str, str] = field(default_factory=dict)
    refused: set[object] = field(default_factory=set)  # calls it does not support
    links: Any = None  # links.Links, once it was asked for them
    activity: Any = None  # activity.Activity, likewise
    mig_mode: int | None = None
    is_ours: bool = True  # False: this container may not use it
    trouble: Trouble | None = None  # said once, until it answers again
    troubled_ns: int = 0  # when `trouble` last changed
    answered: bool = False  # anything since `begin`
    last_error: Exception | None = None
    last_xid: int | None = None
    xid_counts: dict[int, int] = field(default_factory=dict)
    rank_bytes: dict[int, int] = field(default_factory=dict)  # memory that ranks use, by their pid
    _labels_with: dict[object, dict[str, str]] = field(default_factory=dict)

    def name(self, info: GpuInfo, hostname: str) -> None:
        if self.info is not None and self.info.uuid != info.uuid:  # numbered anew
            self.trouble = None
            self.last_xid = None
            self.xid_counts.clear()
        self.info = info
        self.labels = {
            "gpu": str(info.index),
            "UUID": info.uuid,
            "pci_bus_id": info.pci_bus_id,
            "device": f"nvidia{info.index}",
            "modelName": info.name,
            "Hostname": hostname,
        }
        self._labels_with.clear()

    def begin(self) -> None:
        self.answered = False
        self.last_error = None

    def ask(self, call: Callable[[Any], Any]) -> Any:
        """The answer, or None: not supported (never asked again), or not this time.

        Raises NVMLError where the GPU as a whole does not answer.
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
            yield from self.ask(reading) or ()

    def forget_refusals(self) -> None:
        """A driver that was reloaded, or a change of MIG mode, may have made more possible."""
        self.refused.clear()
        self.fast_fields.reset()
        self.slow_fields.reset()
        self.links = None
        self.activity = None

    def samples(self, values: Iterable[Value | Answer], now_ns: int) -> list[Sample]:
        labels = self.labels
        return [
            Sample(name, labels if extra is None else self._with(extra), float(number), now_ns)
            for name, number, extra, *_ in values
        ]

    def _with(self, extra: tuple[tuple[str, str], ...]) -> dict[str, str]:
        labels = self._labels_with.get(extra)
        if labels is None:
            if len(self._labels_with) > 4096:  # processes come and go
                self._labels_with.clear()
            own = {name: self.labels[name] for name in ("gpu", "UUID")}
            labels = self._labels_with[extra] = own | dict(extra)
        return labels

    def event(self, kind: str, detail: str, now_ns: int) -> DeviceEvent:
        return DeviceEvent(time_ns=now_ns, kind=kind, device=f"gpu{self.index}", detail=detail)
