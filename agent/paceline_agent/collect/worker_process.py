"""The process of an isolated collector: reads calls from a socket and writes results to it.

A frame is a 4-byte little-endian length and msgpack. The process is deliberately small (no event
loop, no network) and ends with the agent that started it.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import signal
import struct
import sys
from collections.abc import Sequence
from io import FileIO
from pathlib import Path

import msgspec

from paceline_agent.collect.blocks import ColumnReader, ColumnWriter, PackedColumns, SeriesBlock
from paceline_agent.collect.contract import (
    Collected,
    Collector,
    CollectorUnavailable,
    Context,
    LocalRank,
)
from paceline_wire.batch import CollectorEvent, DeviceEvent, GpuInfo, Sample

LENGTH = struct.Struct("<I")
_READ_BYTES = 1 << 16
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


class Setup(msgspec.Struct):
    module: str
    collector: str
    node_directory: str
    sysfs_root: str
    procfs_root: str
    hostname: str


class Call(msgspec.Struct, array_like=True):
    """A call; `ranks` are the current ranks of the node, which only the agent knows."""

    now_ns: int
    ranks: list[LocalRank]


class Ready(msgspec.Struct, tag="ready"):
    """The collector's module has been loaded; its first call may start."""


class Answered(msgspec.Struct, tag="answered"):
    """The result of a call, with its blocks as columns."""

    samples: list[Sample]
    blocks: list[PackedColumns]
    lasting: list[Sample] | None
    lasting_blocks: list[PackedColumns]
    events: list[DeviceEvent | CollectorEvent]
    gpus: list[GpuInfo] | None
    same_gpus: bool  # the same as in the previous result
    gpu_of_pid: dict[int, int] | None
    more: bool


class Unavailable(msgspec.Struct, tag="unavailable"):
    reason: str


class CallFailed(msgspec.Struct, tag="failed"):
    error: str


_encoder = msgspec.msgpack.Encoder()
_setup_decoder = msgspec.msgpack.Decoder(Setup)
_call_decoder = msgspec.msgpack.Decoder(Call)
_answer_decoder: msgspec.msgpack.Decoder[Answered | Unavailable | CallFailed]
_answer_decoder = msgspec.msgpack.Decoder(Answered | Unavailable | CallFailed)


class Answers:
    """Decodes the results of one worker in the order of arrival."""

    def __init__(self) -> None:
        self._blocks, self._lasting = ColumnReader(), ColumnReader()
        self._gpus: list[GpuInfo] | None = None

    def decode(self, payload: memoryview) -> Collected | Unavailable | CallFailed:
        answer = _answer_decoder.decode(payload)
        if not isinstance(answer, Answered):
            return answer
        if not answer.same_gpus:
            self._gpus = answer.gpus
        lasting: list[Sample | SeriesBlock] | None = None
        if answer.lasting is not None:
            lasting = [*answer.lasting, *self._lasting.read(answer.lasting_blocks)]
        return Collected(
            samples=[*answer.samples, *self._blocks.read(answer.blocks)],
            lasting=lasting,
            events=answer.events,
            gpus=self._gpus,
            gpu_of_pid=answer.gpu_of_pid,
            more=answer.more,
        )


class _Answering:
    """The worker's side: encodes results."""

    def __init__(self) -> None:
        self._blocks, self._lasting = ColumnWriter(), ColumnWriter()
        self._gpus: list[GpuInfo] | None = None

    def answered(self, collected: Collected) -> Answered:
        before, self._gpus = self._gpus, collected.gpus
        is_same = collected.gpus == before
        samples, blocks = _parted(collected.samples)
        lasting, lasting_blocks = _parted(collected.lasting or [])
        return Answered(
            samples=samples,
            blocks=self._blocks.write(blocks),
            lasting=None if collected.lasting is None else lasting,
            lasting_blocks=[] if collected.lasting is None else self._lasting.write(lasting_blocks),
            events=collected.events,
            gpus=None if is_same else collected.gpus,
            same_gpus=is_same,
            gpu_of_pid=collected.gpu_of_pid,
            more=collected.more,
        )


def _parted(brought: Sequence[Sample | SeriesBlock]) -> tuple[list[Sample], list[SeriesBlock]]:
    samples = [one for one in brought if not isinstance(one, SeriesBlock)]
    return samples, [one for one in brought if isinstance(one, SeriesBlock)]


def encode_setup(collector_type: type[Collector], context: Context) -> bytes:
    return _encoder.encode(
        Setup(
            module=collector_type.__module__,
            collector=collector_type.__qualname__,
            node_directory=str(context.node_directory),
            sysfs_root=str(context.sysfs_root),
            procfs_root=str(context.procfs_root),
            hostname=context.hostname,
        )
    )


def encode_call(now_ns: int, ranks: Sequence[LocalRank]) -> bytes:
    return _encoder.encode(Call(now_ns, list(ranks)))


def main() -> None:
    _die_with(int(sys.argv[1]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the agent handles Ctrl-C
    os.dup2(2, 1)  # output of a driver library is not the agent's
    with FileIO(int(sys.argv[2]), "r+") as agent:
        setup = _setup_decoder.decode(_read(agent) or sys.exit(0))
        serve(setup, agent)


def serve(setup: Setup, agent: FileIO) -> None:
    collector_type = getattr(importlib.import_module(setup.module), setup.collector)
    context = Context(
        node_directory=Path(setup.node_directory),
        sysfs_root=Path(setup.sysfs_root),
        procfs_root=Path(setup.procfs_root),
        hostname=setup.hostname,
        local_ranks=lambda: ranks,
    )
    ranks: list[LocalRank] = []
    collector: Collector | None = None
    answering = _Answering()
    _write(agent, Ready())
    while received := _read(agent):
        call = _call_decoder.decode(received)
        ranks = call.ranks
        try:
            if collector is None:
                collector = collector_type(context)
            _write(agent, answering.answered(collector.collect(call.now_ns)))
        except CollectorUnavailable as unavailable:
            _write(agent, Unavailable(str(unavailable)))
        except Exception as error:
            answering = _Answering()
            _write(agent, CallFailed(f"{type(error).__name__}: {error}"))


def _die_with(parent_pid: int) -> None:
    """Have the kernel end this process when the agent ends for any reason."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:  # the agent ended before the line above
        sys.exit(0)


def _read(agent: FileIO) -> bytes:
    """Return one frame; empty at the end."""
    received = b""
    length = LENGTH.size
    while len(received) < length:
        more = agent.read(_READ_BYTES)
        if not more:
            return b""
        received += more
        if len(received) >= LENGTH.size:
            length = LENGTH.size + LENGTH.unpack_from(received)[0]
    return received[LENGTH.size :]


def _write(agent: FileIO, message: Ready | Answered | Unavailable | CallFailed) -> None:
    payload = _encoder.encode(message)
    left = memoryview(LENGTH.pack(len(payload)) + payload)
    while left:
        left = left[agent.write(left) :]
