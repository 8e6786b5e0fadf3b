"""Recording of process groups with a C++ library; `process_groups.py` does the same in Python.

`recorder_of_process_groups` picks one of the two. The library measures calls on an NVIDIA GPU with
CUDA events; with another accelerator, Python is used.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable
from ctypes import (
    CFUNCTYPE,
    POINTER,
    c_char_p,
    c_int,
    c_int64,
    c_size_t,
    c_uint,
    c_uint64,
    c_void_p,
)
from functools import partial, wraps
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

from paceline.collectives.build import find_library, start_build
from paceline.collectives.channels import Channels
from paceline.collectives.process_groups import ProcessGroupRecorder
from paceline.recorder import Recorder
from paceline.writer import Writer, make_wait, pure_python
from paceline_wire.ending import ending_path, file_mode
from paceline_wire.ring import (
    FRAME_WORDS,
    FRAMES,
    GROUP_BYTES_SHIFT,
    GROUP_WORDS,
    GROUPS,
    PEER_WORDS,
    PEERS,
    STATE_DEPTH,
    STATE_FRAMES,
    STATE_GROUPS,
    STATE_PEERS,
)
from paceline_wire.spans import NONE_32, Flag, Op

INTERFACE = 2  # equals the first value of LAYOUT in _process_groups.cpp
LAYOUT = (
    *(INTERFACE, STATE_DEPTH, STATE_FRAMES, FRAMES, FRAME_WORDS, STATE_GROUPS, GROUPS),
    *(GROUP_WORDS, GROUP_BYTES_SHIFT, STATE_PEERS, PEERS, PEER_WORDS),
    *(Flag.ASYNC, Flag.WAIT, Flag.DEVICE),
    *(Op.ALL_REDUCE, Op.ALL_GATHER, Op.REDUCE_SCATTER, Op.BROADCAST, Op.BARRIER, Op.ALL_TO_ALL),
    *(Op.REDUCE, Op.GATHER, Op.SCATTER, Op.SEND, Op.RECV),
)
DEFINE = CFUNCTYPE(c_int, c_char_p, c_uint64)
POINTER_BYTES = ctypes.sizeof(c_void_p)
NO_CALL = (1 << 64) - 1  # after the last call of a batch


def recorder_of_process_groups(recorder: Recorder) -> ProcessGroupRecorder | NativeRecorder:
    """Return the recorder of process groups: the library if it is usable, otherwise Python."""
    devices: Any = sys.modules["torch"].accelerator
    accelerator = devices.current_accelerator() if devices.is_available() else None
    if Writer is pure_python.Writer or (accelerator is not None and accelerator.type != "cuda"):
        return ProcessGroupRecorder(recorder)
    library = Library.load()
    if library is None:
        start_build()
        return ProcessGroupRecorder(recorder)
    if accelerator is not None and not library.functions.pl_measures_devices():
        return ProcessGroupRecorder(recorder)
    return NativeRecorder(recorder, library)


class Library:
    """The C++ library, loaded once per process, and the methods of torch that it replaces."""

    _loaded: ClassVar[Library | None] = None

    @classmethod
    def load(cls) -> Library | None:
        """Return the library of this process; None if none was built for this torch."""
        if cls._loaded is None:
            path = find_library()
            if path is None:
                return None
            try:
                functions = ctypes.PyDLL(str(path))
            except OSError:
                return None
            if _layout(functions) != LAYOUT:
                return None
            cls._loaded = cls(functions)
        return cls._loaded

    def __init__(self, functions: Any) -> None:
        import torch  # noqa: PLC0415

        self.functions = functions
        functions.pl_wait_begin.argtypes = [c_void_p]
        functions.pl_wait_begin.restype = c_int64
        functions.pl_wait_end.argtypes = [c_int64, c_int]
        functions.pl_describe.argtypes = [c_int64, POINTER(c_uint64)]
        functions.pl_set_source.argtypes = [c_int64, c_uint64]
        functions.pl_set_group.argtypes = [c_uint64, c_uint64, POINTER(c_int64), c_size_t]
        functions.pl_start.argtypes = [POINTER(c_uint64)]
        functions.pl_lost.restype = c_uint64
        functions.pl_take.argtypes = [c_int64]
        functions.pl_batch_end.argtypes = [c_void_p]
        functions.pl_set_anchor.argtypes = [c_void_p, c_int, c_uint64]
        functions.pl_report_termination.argtypes = [c_char_p, c_uint]
        self.take_rows = _address(functions.pl_take_rows)
        self.recorder: NativeRecorder | None = None
        # All recorders of this process, because C++ writes to their memory when a call completes,
        # even after `finish`.
        self.started: list[NativeRecorder] = []
        self._replaced: list[tuple[Any, str, Any, Any]] = []
        # Address of the Work of each future. A future holds its result, and the script may never
        # wait for it in Python: it must not live longer than without Paceline.
        self._futures: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
        work: Any = torch.distributed.Work
        self._replace(
            *(work, "wait"),
            make_wait(
                *(work, work.wait, self._end_wait, _address(functions.pl_wait_begin)),
                *(_address(functions.pl_needs_python), _address(functions.pl_wait_end)),
            ),
        )
        self._replace(work, "synchronize", self._waiting(work.synchronize, _address_of_work))
        self._replace(work, "get_future", self._watching_futures(work.get_future))
        future: Any = torch._C.Future
        self._replace(future, "wait", self._waiting(future.wait, self._work_of_future))
        group: Any = torch.distributed.ProcessGroup
        self._replace(group, "_start_coalescing", self._starting_batch(group._start_coalescing))
        self._replace(group, "_end_coalescing", self._ending_batch(group._end_coalescing))
        self.attach()

    def attach(self) -> None:
        """Register the kernels and replace the methods."""
        self.operators: int = self.functions.pl_install()
        for owner, name, _, replacement in self._replaced:
            setattr(owner, name, replacement)

    def detach(self) -> None:
        """Restore torch.

        No thread may communicate meanwhile, because torch's tables have no lock.
        """
        self.functions.pl_remove()
        for owner, name, original, _ in self._replaced:
            setattr(owner, name, original)

    def _replace(self, owner: Any, name: str, replacement: Any) -> None:
        self._replaced.append((owner, name, getattr(owner, name), replacement))

    def _end_wait(self, work: Any, call: int) -> None:
        if self.recorder is not None:
            self.recorder.end_wait(work, call)

    def _watching_futures(self, original: Any) -> Any:
        @wraps(original)
        def get_future(work: Any) -> Any:
            future = original(work)
            if self.recorder is not None:
                self._futures[future] = _address_of_work(work)
            return future

        return get_future

    def _starting_batch(self, original: Any) -> Any:
        @wraps(original)
        def start(*args: Any, **kwargs: Any) -> Any:
            self.functions.pl_batch_begin()
            return original(*args, **kwargs)

        return start

    def _ending_batch(self, original: Any) -> Any:
        @wraps(original)
        def end(*args: Any, **kwargs: Any) -> Any:
            work = None
            try:
                work = original(*args, **kwargs)
            finally:
                self.functions.pl_batch_end(None if work is None else _address_of_work(work))
            return work

        return end

    def _work_of_future(self, future: Any) -> int:
        """Return the address of the Work that a future belongs to; 0 if it is unknown."""
        return self._futures.pop(future, 0)

    def _waiting(self, original: Any, work_of: Any) -> Any:
        functions = self.functions

        @wraps(original)
        def wait(awaited: Any, *args: Any, **kwargs: Any) -> Any:
            call = functions.pl_wait_begin(work_of(awaited))
            if call < 0:
                return original(awaited, *args, **kwargs)
            succeeded = False
            try:
                result = original(awaited, *args, **kwargs)
                succeeded = True
            finally:
                functions.pl_wait_end(call, succeeded)
            return result

        return wait


class NativeRecorder:
    """Records the calls of all process groups with the library, for one ring."""

    def __init__(self, recorder: Recorder, library: Library) -> None:
        from torch.distributed import distributed_c10d  # noqa: PLC0415

        self._recorder = recorder
        self._library = library
        self._c10d: Any = distributed_c10d
        self.channels = Channels(recorder, distributed_c10d)
        writer: Any = recorder
        # Writes what was recorded since the last step boundary; without a function in Python.
        self.at_boundary: Callable[[], None] = partial(writer.take_rows, library.take_rows)
        self._define = DEFINE(self._define_group)

    def set_anchor(self, event: Any, host_ns: int) -> None:
        """Measure calls on a GPU from now on: `event` was passed at this time of the host."""
        self._library.functions.pl_set_anchor(event.cuda_event, event.device.index, host_ns)

    def install(self) -> None:
        """Start recording."""
        self._library.started.append(self)
        writer: Any = self._recorder
        addresses = [*writer.addresses(), ctypes.cast(self._define, c_void_p).value]
        self._library.functions.pl_start((c_uint64 * len(addresses))(*addresses))
        self._library.recorder = self
        path = self._recorder.ring.path
        report = self._library.functions.pl_report_termination
        report(os.fsencode(ending_path(path)), file_mode(path.parent))

    def uninstall(self) -> None:
        """Stop recording. In a forked child: does not touch the parent's communication."""
        if self._library.recorder is self:
            self._library.functions.pl_stop()
            self._library.functions.pl_report_termination(None, 0)
            self._library.recorder = None

    def finish(self) -> None:
        """Record the calls that have completed."""
        self.at_boundary()
        self._recorder.failures += self._library.functions.pl_lost()

    def end_wait(self, work: Any, call: int) -> None:
        """End a wait that needs Python: in a transfer action, or for any sender."""
        functions = self._library.functions
        action: Any = self._recorder.action
        member = call
        while member != NO_CALL:
            described = (c_uint64 * 6)()
            functions.pl_describe(member, described)
            in_action, peer, size, sequence, started_ns, following = described
            if not in_action:
                if peer == NONE_32:
                    functions.pl_set_source(member, work._source_rank())
            elif action is not None and action.start <= started_ns:
                action.add_transfer(peer, size, sequence)
                functions.pl_take(member)
            member = following
        functions.pl_wait_end(call, True)

    def _define_group(self, name: bytes, slot: int) -> int:
        """Define a process group at its first call. Return 0, or -1 if it cannot be recorded."""
        try:
            process_group = self._group_of(name.decode())
            channel = self.channels.group(process_group)
            if channel is None:
                return -1
            ranks = self._c10d.get_process_group_ranks(process_group)
            self._library.functions.pl_set_group(
                slot, channel.group, (c_int64 * len(ranks))(*ranks), len(ranks)
            )
            return 0
        except Exception:
            self._recorder.failures += 1
            return -1

    def _group_of(self, name: str) -> Any:
        groups = self._c10d._world.pg_names.items()
        return next(process_group for process_group, known in groups if known == name)


def _address(function: Any) -> int:
    return ctypes.cast(function, c_void_p).value or 0


def _address_of_work(work: Any) -> int:
    """Return the address of the C++ object, which a pybind11 object holds after its header."""
    return c_void_p.from_address(id(work) + object.__basicsize__).value or 0


def _layout(functions: Any) -> tuple[int, ...]:
    functions.pl_layout.restype = POINTER(c_uint64)
    count = c_size_t()
    values = functions.pl_layout(ctypes.byref(count))
    return tuple(values[: count.value])
