"""Recording of every call of a process group, from any caller, and of every wait for its result.

Launches: a kernel on each c10d operator, registered under the dispatch key BackendSelect. Each call
of any backend and device, from Python and C++, passes through it, also below autograd. The kernel
then calls the backend's own kernel.

Waits: `Work.wait`, `Future.wait` and `wait_tensor` are replaced or get a kernel.
DistributedDataParallel's reducer waits in C++ at the end of a backward pass; this wait is measured
by two callbacks of the autograd engine, one before the reducer's own callback and one after it.

Completion is polled at later launches and waits. A callback of the result's future would be exact,
but it runs on the backend's thread and takes the GIL before waiters are notified, which would delay
the training.

Torch keeps the kernels for the life of the process; without a recorder they only forward calls.
"""

from __future__ import annotations

import contextlib
from _thread import get_ident
from collections.abc import Callable
from functools import wraps
from time import perf_counter_ns
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from paceline.collectives.call import CommunicationCall
from paceline.collectives.channels import Channels
from paceline.collectives.operations import OPERATORS, CallSignature, first_tensor, read_signature
from paceline.recorder import Recorder
from paceline_wire.spans import NONE_32, Op

Function = Callable[..., Any]

SOONEST_OTHER_WORK_NS = 1_000_000  # a wait that begins sooner after the launch belongs to the call
POLLED_PER_LAUNCH = 4
MAXIMUM_IN_FLIGHT = 1 << 12  # later calls are recorded as launched, not as complete


class InFlight(NamedTuple):
    """A `Work` that has not completed, and its calls. A batch of calls shares one Work."""

    work: Any
    calls: list[CommunicationCall]


class ProcessGroupRecorder:
    """Records the calls of all process groups, and the waits for their results."""

    def __init__(self, recorder: Recorder) -> None:
        # Imported here: torch is optional, and slow to load for scripts that do not use it.
        import torch  # noqa: PLC0415
        from torch.distributed import distributed_c10d  # noqa: PLC0415

        self._recorder = recorder
        self._wait: Function = torch.distributed.Work.wait
        self._future_of: Function = torch.distributed.Work.get_future
        self._boxed = torch.ScriptObject
        self._unbox_work = torch.distributed.Work.unbox
        self._unbox_group = torch.distributed.ProcessGroup.unbox
        self._graph_task: Callable[[], int] = torch._C._current_graph_task_id
        self._queue_callback = torch.autograd.Variable._execution_engine.queue_callback
        self.channels = Channels(recorder, distributed_c10d)
        self._in_flight: dict[int, InFlight] = {}  # by id() of the Work, oldest first
        # id() of the Work of each future. A future holds its result, and the script may never wait
        # for it in Python: it must not live longer than without Paceline.
        self._futures: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
        # by thread: the newest launch that no wait followed yet
        self._latest: dict[int, CommunicationCall] = {}
        # by thread, while it collects a batch
        self._batches: dict[int, list[CommunicationCall]] = {}
        self._watched_task = -1  # the backward pass whose end has a callback
        self._awaited: CommunicationCall | None = None  # awaited at the end of the backward pass

    def install(self) -> None:
        """Start recording."""
        hooks = Hooks.get()
        self._wait, self._future_of = hooks.wait_for_work, hooks.future_of
        hooks.recorder = self

    def finish(self) -> None:
        """Record the calls that have completed."""
        self._guard(self._poll, MAXIMUM_IN_FLIGHT)

    def uninstall(self) -> None:
        """Stop recording. In a forked child: does not touch the parent's communication."""
        hooks = Hooks.get()
        if hooks.recorder is self:
            hooks.recorder = None

    # Launch

    def begin(self, signature: CallSignature, args: tuple[Any, ...]) -> CommunicationCall | None:
        """Start recording a call. Return None if it cannot be recorded."""
        recorder = self._recorder
        try:
            process_group = self._unbox_group(args[signature.group])
            group = self.channels.group(process_group)
            if group is None:
                return None
            payload = None if signature.payload is None else args[signature.payload]
            channel, rank = group, NONE_32
            if signature.is_transfer:
                in_group = None if signature.peer is None else args[signature.peer]
                rank = self.channels.global_rank(process_group, in_group)
                channel = self.channels.peer(rank, signature.op == Op.RECV)
            blocks = None
            if signature.is_async is not None:
                # Torch omits arguments that have their default, which is true.
                blocks = len(args) > signature.is_async and not args[signature.is_async]
            call = CommunicationCall(
                recorder, signature.op, group.group, channel, rank, payload, blocks
            )
            call.block(call.started_ns)
            return call
        except Exception:
            recorder.failures += 1
            return None

    def launched(self, call: CommunicationCall, args: tuple[Any, ...], result: Any) -> None:
        """Continue with a call whose launch has returned."""
        boxed = result[-1] if type(result) is tuple and result else result
        work = self._unbox_work(boxed) if isinstance(boxed, self._boxed) else None
        ident = get_ident()
        if work is None:  # it blocked, like a monitored barrier, or its batch has the Work
            if (batch := self._batches.get(ident)) is not None:
                call.launched()
                batch.append(call)
            else:
                call.complete()
            return
        call.launched()
        self._poll(POLLED_PER_LAUNCH)
        output = first_tensor(args[0])
        if output is not None:
            call.output = output.data_ptr()
        call.graph_task = task = self._graph_task()
        if len(self._in_flight) < MAXIMUM_IN_FLIGHT:
            self._in_flight[id(work)] = InFlight(work, [call])
            self._latest[ident] = call
        if task >= 0 and task != self._watched_task:
            self._watched_task = task
            self._queue_callback(self._at_backward_end)

    def abandon(self, call: CommunicationCall) -> None:
        """Abandon a call whose launch failed; the state page still shows it as entered."""
        call.unblock()

    def begin_batch(self) -> None:
        """Collect the calls of this thread until `end_batch`: they share one Work."""
        self._batches[get_ident()] = []

    def end_batch(self, work: Any) -> None:
        """Wait with `work` for all calls since `begin_batch`."""
        calls = self._batches.pop(get_ident(), None)
        if not calls:
            return
        # Calls that also had their own Work still get one record each.
        if work is not None:
            self._in_flight[id(work)] = InFlight(work, calls)

    # Completion

    def _poll(self, most: int) -> None:
        """Record the completed ones among the oldest calls."""
        while self._in_flight and most > 0:
            key, (work, calls) = next(iter(self._in_flight.items()))
            if not work.is_completed():
                return
            most -= 1
            self._in_flight.pop(key, None)
            if calls[0].timer is None and not self._succeeded(work):
                continue  # the state page still shows it as entered
            for call in calls:
                call.complete_unwaited()

    def _succeeded(self, work: Any) -> bool:
        """Return whether a complete Work succeeded, so that its wait returns immediately."""
        try:
            self._wait(work)
        except Exception:
            return False
        return True

    # Waits

    def wait_for(self, work: Any, wait: Callable[[], Any]) -> Any:
        """Run `wait`, which blocks until `work` is complete, and record it."""
        found = self._in_flight.pop(id(work), None)
        if found is None:
            return wait()
        return self._record_wait(found, wait)

    def wait_for_output(self, tensor: Any, wait: Callable[[], Any]) -> Any:
        """Run `wait`, which blocks until the call that writes `tensor` is complete."""
        found = self._find_writer(tensor) if self._in_flight else None
        return wait() if found is None else self._record_wait(found, wait)

    def _find_writer(self, tensor: Any) -> InFlight | None:
        """Remove and return the call that writes `tensor`; None if it is unknown or complete."""
        try:
            address = tensor.data_ptr()
        except RuntimeError:  # the compiler traces with tensors that have no memory
            return None
        for key, in_flight in list(self._in_flight.items()):
            if in_flight.calls[0].output == address:
                return self._in_flight.pop(key, None)
        return None

    def watch_future(self, work: Any, future: Any) -> None:
        """Remember which Work a future belongs to."""
        if id(work) in self._in_flight:
            self._futures[future] = id(work)

    def wait_for_future(self, future: Any, wait: Callable[[], Any]) -> Any:
        """Run `wait`, which blocks until `future` is complete, and record it."""
        known = self._futures.pop(future, None)
        found = None if known is None else self._in_flight.pop(known, None)
        return wait() if found is None else self._record_wait(found, wait)

    def _record_wait(self, in_flight: InFlight, wait: Callable[[], Any]) -> Any:
        work, calls = in_flight
        guard = self._guard
        at_once = self._waits_at_once(calls)
        if at_once:
            guard(calls[0].block, perf_counter_ns())
        else:
            completed = work.is_completed()
            for call in calls:
                guard(call.wait, completed)
        try:
            result = wait()
        except BaseException:  # not complete: the state page still shows it as entered
            for call in reversed(calls):
                guard(call.unblock)
            raise
        for call in reversed(calls):
            if call.peer == NONE_32 and call.op == Op.RECV:
                guard(self._set_source, call, work)
            guard(call.complete if at_once else call.complete_work)
        return result

    def _waits_at_once(self, calls: list[CommunicationCall]) -> bool:
        """Return whether launch and wait are one blocking call of the script."""
        latest = self._latest.pop(get_ident(), None)
        if len(calls) > 1:
            return False
        call = calls[0]
        if call.blocks is not None:
            return call.blocks
        return latest is call and perf_counter_ns() - call.launched_ns < SOONEST_OTHER_WORK_NS

    def _set_source(self, call: CommunicationCall, work: Any) -> None:
        """Set the peer of a receive from any rank, which is unknown until it returns."""
        rank = work._source_rank()
        call.peer = rank
        call.channel = self.channels.peer(rank, True)
        call.sequence = call.channel.enter(call.op, call.started_ns)

    # The end of a backward pass

    def _at_backward_end(self) -> None:
        """Start the wait for the calls of this backward pass.

        Runs before the reducer's callback.
        """
        try:
            self._poll(MAXIMUM_IN_FLIGHT)
            launched = self._launched_by(self._watched_task)
            if launched:
                self._awaited = launched[-1].calls[-1]
                self._awaited.wait(False)
                self._queue_callback(self._after_backward_end)
        except Exception:
            self._recorder.failures += 1

    def _after_backward_end(self) -> None:
        """Record the calls that completed since `_at_backward_end`, the newest one with its
        wait."""
        try:
            awaited, self._awaited = self._awaited, None
            if awaited is not None:
                awaited.unblock()
            for work, calls in self._launched_by(self._watched_task):
                # The reducer waits for futures, which gloo completes just before their Works.
                if calls[0].timer is None and not self._future_of(work).done():
                    continue  # another thread waits for it later
                self._in_flight.pop(id(work), None)
                for call in calls:
                    call.complete_work()
        except Exception:
            self._recorder.failures += 1

    def _launched_by(self, task: int) -> list[InFlight]:
        found = list(self._in_flight.values())
        return [in_flight for in_flight in found if in_flight.calls[-1].graph_task == task]

    def _guard(self, action: Callable[..., None], *args: Any) -> None:
        """Run an action; count an error of Paceline and let the communication continue."""
        try:
            action(*args)
        except Exception:
            self._recorder.failures += 1


class Hooks:
    """The kernels and replaced methods of this process; they use `recorder` if it is set."""

    _instance: Hooks | None = None

    @classmethod
    def get(cls) -> Hooks:
        """Return the hooks of this process, which are installed at the first call."""
        if cls._instance is None:
            cls._instance = cls()
        return cls._instance

    def __init__(self) -> None:
        import torch  # noqa: PLC0415

        self.recorder: ProcessGroupRecorder | None = None
        key = torch._C.DispatchKey.BackendSelect
        self._below = torch._C._dispatch_keyset_full_after(key)
        # Torch removes the kernels when these are deleted.
        library: Any = torch.library.Library
        self._libraries = [library(space, "IMPL") for space in ("c10d", "_c10d_functional")]
        c10d, functional = self._libraries
        for name, (op, payload) in OPERATORS.items():
            # This torch may lack the operator, or have it with other arguments.
            with contextlib.suppress(AttributeError, LookupError, RuntimeError, TypeError):
                operator = getattr(torch.ops.c10d, name).default
                arguments = [argument.name for argument in operator._schema.arguments]
                kernel = self._kernel(operator, read_signature(op, payload, arguments))
                c10d.impl(name, kernel, "BackendSelect", with_keyset=True)
        operator = torch.ops._c10d_functional.wait_tensor.default
        functional.impl(
            "wait_tensor", self._wait_kernel(operator), "BackendSelect", with_keyset=True
        )
        work: Any = torch.distributed.Work
        group: Any = torch.distributed.ProcessGroup
        future: Any = torch._C.Future
        self.wait_for_work: Function = work.wait
        self.future_of: Function = work.get_future
        self._replace(work, "wait", self._waiting(ProcessGroupRecorder.wait_for))
        self._replace(work, "synchronize", self._waiting(ProcessGroupRecorder.wait_for))
        self._replace(work, "get_future", self._watching_futures)
        self._replace(future, "wait", self._waiting(ProcessGroupRecorder.wait_for_future))
        self._replace(group, "_start_coalescing", self._starting_batch)
        self._replace(group, "_end_coalescing", self._ending_batch)

    def _replace(self, owner: Any, name: str, replacement: Callable[[Function], Function]) -> None:
        if (original := getattr(owner, name, None)) is not None:
            setattr(owner, name, replacement(original))

    def _kernel(self, operator: Any, signature: CallSignature) -> Function:
        redispatch, below = operator.redispatch, self._below

        def kernel(keyset: Any, *args: Any) -> Any:
            recorder = self.recorder
            call = None if recorder is None else recorder.begin(signature, args)
            if call is None or recorder is None:
                return redispatch(keyset & below, *args)
            try:
                result = redispatch(keyset & below, *args)
            except BaseException:
                recorder._guard(recorder.abandon, call)
                raise
            recorder._guard(recorder.launched, call, args, result)
            return result

        return kernel

    def _wait_kernel(self, operator: Any) -> Function:
        redispatch, below = operator.redispatch, self._below

        def kernel(keyset: Any, tensor: Any) -> Any:
            recorder = self.recorder
            if recorder is None:
                return redispatch(keyset & below, tensor)
            return recorder.wait_for_output(tensor, lambda: redispatch(keyset & below, tensor))

        return kernel

    def _waiting(self, wait_for: Function) -> Callable[[Function], Function]:
        def replacement(original: Function) -> Function:
            @wraps(original)
            def wait(awaited: Any, *args: Any, **kwargs: Any) -> Any:
                recorder = self.recorder
                if recorder is None:
                    return original(awaited, *args, **kwargs)
                return wait_for(recorder, awaited, lambda: original(awaited, *args, **kwargs))

            return wait

        return replacement

    def _watching_futures(self, original: Function) -> Function:
        @wraps(original)
        def get_future(work: Any) -> Any:
            future = original(work)
            if self.recorder is not None:
                self.recorder._guard(self.recorder.watch_future, work, future)
            return future

        return get_future

    def _starting_batch(self, original: Function) -> Function:
        @wraps(original)
        def start(group: Any, *args: Any, **kwargs: Any) -> Any:
            if self.recorder is not None:
                self.recorder._guard(self.recorder.begin_batch)
            return original(group, *args, **kwargs)

        return start

    def _ending_batch(self, original: Function) -> Function:
        @wraps(original)
        def end(group: Any, *args: Any, **kwargs: Any) -> Any:
            work = original(group, *args, **kwargs)
            if self.recorder is not None:
                self.recorder._guard(self.recorder.end_batch, work)
            return work

        return end
