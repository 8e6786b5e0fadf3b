"""The process an isolated collector lives in: reads calls from a pipe, answers on another.

Frames are a 4-byte little-endian length and msgpack. It is small on purpose (no event loop, no
network) and dies with the agent that started it.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import signal
import struct
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

import msgspec

from paceline_agent.collectors.contract import (
    Collected,
    Collector,
    CollectorUnavailable,
    Context,
    LocalRank,
)

_LENGTH = struct.Struct("<I")
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


class Setup(msgspec.Struct):
    module: str
    collector: str
    node_directory: str
    sysfs_root: str
    procfs_root: str
    hostname: str


class Call(msgspec.Struct, array_like=True):
    """`ranks` are those of the node now: only the agent knows them."""

    now_ns: int
    ranks: list[LocalRank]


class Ready(msgspec.Struct, tag="ready"):
    """The collector's module is loaded; its first call may start."""


class Answered(msgspec.Struct, tag="answered"):
    collected: Collected


class Unavailable(msgspec.Struct, tag="unavailable"):
    reason: str


class Failed(msgspec.Struct, tag="failed"):
    error: str


Answer = Answered | Unavailable | Failed

_encoder = msgspec.msgpack.Encoder()
_call_decoder = msgspec.msgpack.Decoder(Call)
_answer_decoder: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)


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


def decode_answer(payload: bytes) -> Answer:
    return _answer_decoder.decode(payload)


def main() -> None:
    _die_with(int(sys.argv[1]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the agent's to handle
    calls = sys.stdin.buffer
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # a driver library that prints must not tear a frame
    setup = msgspec.msgpack.decode(_read(calls) or sys.exit(0), type=Setup)
    serve(setup, calls, answers)


def serve(setup: Setup, calls: BinaryIO, answers: BinaryIO) -> None:
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
    _write(answers, Ready())
    while received := _read(calls):
        call = _call_decoder.decode(received)
        ranks = call.ranks
        try:
            if collector is None:
                collector = collector_type(context)
            _write(answers, Answered(collector.collect(call.now_ns)))
        except CollectorUnavailable as unavailable:
            _write(answers, Unavailable(str(unavailable)))
        except Exception as error:
            _write(answers, Failed(f"{type(error).__name__}: {error}"))


def _die_with(parent_pid: int) -> None:
    """Have the kernel end this process when the agent dies, however it dies."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:  # it died before the line above
        sys.exit(0)


def _read(stream: BinaryIO) -> bytes:
    header = stream.read(_LENGTH.size)
    if len(header) < _LENGTH.size:
        return b""
    (length,) = _LENGTH.unpack(header)
    return stream.read(length)


def _write(stream: BinaryIO, message: Ready | Answer) -> None:
    payload = _encoder.encode(message)
    stream.write(_LENGTH.pack(len(payload)) + payload)
    stream.flush()
