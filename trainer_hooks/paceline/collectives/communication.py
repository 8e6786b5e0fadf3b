"""Timing torch.distributed: its functions are wrapped, and so is `Work.wait`.

The wrappers stand in every module that holds one of the functions by name, so that calls are seen
whoever makes them. Not seen: what C++ starts itself (DistributedDataParallel's reducer) and the
traceable functional collectives. Only the outermost call of a thread is timed: the calls that
torch's own functions make inside it belong to it.
"""

from __future__ import annotations

import inspect
import sys
import weakref
from _thread import get_ident
from collections.abc import Callable, Mapping
from functools import partial, wraps
from time import perf_counter_ns
from typing import Any

from paceline.collectives.channels import Channels
from paceline.recorder import Recorder
from paceline.writer import Channel, Collective
from paceline.writer.device import Event, on_device
from paceline.writer.pure import NO_CHUNK, NO_MICROBATCH
from paceline.writer.sections import Transfer
from paceline_wire.ring import GROUP_BYTES_SHIFT
from paceline_wire.spans import NONE_32, Flag, Op

# Function: (op, the argument whose size is the payload: the larger side, as nccl-tests count).
COLLECTIVES: Mapping[str, tuple[Op, str]] = {
    "all_reduce": (Op.ALL_REDUCE, "tensor"),
    "all_reduce_coalesced": (Op.ALL_REDUCE, "tensors"),
    "all_gather": (Op.ALL_GATHER, "tensor_list"),
    "all_gather_coalesced": (Op.ALL_GATHER, "input_tensor_list"),
    "all_gather_into_tensor": (Op.ALL_GATHER, "output_tensor"),
    "all_gather_single": (Op.ALL_GATHER, "output_tensor"),
    "reduce_scatter": (Op.REDUCE_SCATTER, "input_list"),
    "reduce_scatter_tensor": (Op.REDUCE_SCATTER, "input"),
    "reduce_scatter_single": (Op.REDUCE_SCATTER, "input"),
    "broadcast": (Op.BROADCAST, "tensor"),
    "barrier": (Op.BARRIER, ""),
    "monitored_barrier": (Op.BARRIER, ""),
    "all_to_all": (Op.ALL_TO_ALL, "input_tensor_list"),
    "all_to_all_single": (Op.ALL_TO_ALL, "input"),
    "reduce": (Op.REDUCE, "tensor"),
    "gather": (Op.GATHER, "tensor"),
    "scatter": (Op.SCATTER, "tensor"),
}
# Function: (op, the arguments that name the peer globally and within the group).
TRANSFERS: Mapping[str, tuple[Op, str, str]] = {
    "send": (Op.SEND, "dst", "group_dst"),
    "isend": (Op.SEND, "dst", "group_dst"),
    "recv": (Op.RECV, "src", "group_src"),
    "irecv": (Op.RECV, "src", "group_src"),
}

_DIRECTIONS = (Op.SEND, Op.RECV)

Original = Callable[..., Any]


class Argument:
    """Finds one argument of a call, given by position or by name."""

    __slots__ = ("name", "position")

    def __init__(self, function: Original, name: str) -> None:
        self.name = name
        parameters = list(inspect.signature(function).parameters)
        self.position = parameters.index(name) if name in parameters else len(parameters)

    def of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return args[self.position] if len(args) > self.position else kwargs.get(self.name)


class Call:
    """One collective or transfer, from its call to its completion."""

    __slots__ = (
        "action",
        "action_started_ns",
        "begun",
        "channel",
        "depth",
        "op",
        "peer",
        "place",
        "recorder",
        "reference",
        "sequence",
        "size",
        "started_ns",
        "timer",
        "waited",
        "waited_since_ns",
        "word1",
        "word2",
    )

    def __init__(
        self,
        recorder: Recorder,
        op: int,
        group: int,
        channel: Channel,
        peer: int,
        payload: Any,
    ) -> None:
        self.recorder = recorder
        self.channel = channel
        self.peer = peer
        self.size = _size(payload)
        self.timer = recorder.timer if on_device(payload) else None
        self.depth: int | None = None
        self.action: Transfer | None = None
        self.reference: weakref.ref[Any] | None = None
        if recorder.owner == get_ident():
            self.word2 = recorder.word2
            chunk = recorder.chunk
            action = recorder.action
            direction = None if op not in _DIRECTIONS else op == Op.RECV
            if action is not None and action.receives is direction:
                self.action = action
                self.action_started_ns = action.start
                op = action.op
        else:
            self.word2 = recorder.step | NO_MICROBATCH
            chunk = NO_CHUNK
        self.op = op
        self.word1 = op | group << 16 | chunk << 32
        self.place = group << 32 | peer
        self.begun = None if self.timer is None else self.timer.mark()
        self.waited: Event | None = None
        self.waited_since_ns: int | None = None
        self.started_ns = perf_counter_ns()
        self.sequence = channel.enter(op | self.size << GROUP_BYTES_SHIFT, self.started_ns)

    def block(self, now: int) -> None:
        """The owner's thread is about to be held by this call: show it on the state page."""
        if self.recorder.owner != get_ident():
            return
        action = self._current_action()
        if action is not None:
            action.shows(self.place, self.sequence)
        else:
            self.depth = self.recorder.push(self.op, now, self.place, self.sequence)

    def unblock(self) -> None:
        if self.depth is not None:
            self.recorder.pop(self.depth)
            self.depth = None

    def complete(self) -> None:
        """A blocking call has returned."""
        now = perf_counter_ns()
        self.unblock()
        self.channel.leave(self.sequence)
        if not self._lend():
            ended = None if self.timer is None else self.timer.mark()
            flag = Flag.ASYNC if self._is_beside() else Flag.NONE
            self._record(flag, self.started_ns, now, self.begun, ended)

    def wait(self, completed: bool) -> None:
        """The host asks for the end of an asynchronous one, and is held unless it is there."""
        self.reference = None
        if completed or self._is_beside():
            return
        self.waited_since_ns = perf_counter_ns()
        self.block(self.waited_since_ns)
        if self.timer is not None:
            self.waited = self.timer.mark()

    def complete_work(self) -> None:
        """The host has seen an asynchronous one end."""
        now = perf_counter_ns()
        self.unblock()
        self.channel.leave(self.sequence)
        if self._lend():
            return
        ended = None if self.timer is None else self.timer.mark()
        self._record(Flag.ASYNC, self.started_ns, now, self.begun, ended)
        if self.waited_since_ns is not None:
            # A second event: each pair goes back to the pool by itself.
            ended = None if self.timer is None else self.timer.mark()
            self._record(Flag.WAIT, self.waited_since_ns, now, self.waited, ended)

    def dropped(self) -> None:
        """Nobody waited and the work is gone; may run anywhere, so it only queues."""
        self.channel.leave(self.sequence)
        self.recorder.enqueue(self._row(Flag.ASYNC, self.started_ns, perf_counter_ns()))

    def _is_beside(self) -> bool:
        """Whether another thread makes this call, as one that writes a checkpoint does.

        It holds nobody up. On a device it does: there autograd's thread is part of the training.
        """
        return self.timer is None and self.recorder.owner != get_ident()

    def _current_action(self) -> Transfer | None:
        """The transfer action this call was made in, while we are still inside it."""
        action = self.action
        if action is None or action is not self.recorder.action:
            return None
        return action if action.start == self.action_started_ns else None

    def _lend(self) -> bool:
        action = self._current_action()
        if action is None or self.recorder.owner != get_ident():
            return False
        action.carries(self.peer, self.size, self.sequence)
        return True

    def _record(
        self, flag: int, start: int, end: int, begun: Event | None, ended: Event | None
    ) -> None:
        row = self._row(flag, start, end)
        if self.timer is not None and begun is not None and ended is not None:
            self.timer.enqueue((*row[:5], begun, ended))
        elif self.recorder.owner == get_ident():
            self.recorder.write(*row)
        else:
            self.recorder.enqueue(row)

    def _row(self, flag: int, start: int, end: int) -> tuple[int, int, int, int, int, int, int]:
        word1 = self.word1 | flag << 48
        return word1, self.word2, self.peer, self.size, self.sequence, start, end - start


class Wrapped:
    """The wrapping of torch.distributed for one recorder."""

    def __init__(self, recorder: Recorder) -> None:
        # Imported here: torch is optional, and slow to load for who does not use it.
        import torch.distributed as distributed  # noqa: PLC0415
        from torch import Tensor  # noqa: PLC0415
        from torch.compiler import is_dynamo_compiling  # noqa: PLC0415
        from torch.distributed import distributed_c10d  # noqa: PLC0415

        self._recorder: Recorder | None = recorder
        self._work_class: Any = distributed.Work
        self._tensor = Tensor
        self._c10d: Any = distributed_c10d
        # Dynamo folds it to true while it traces us; `is_compiling` asks more, and costs 10x.
        self._is_compiling = is_dynamo_compiling
        self.channels = Channels(recorder, distributed_c10d)
        self._calling: set[int] = set()  # other threads inside a timed function
        self._works: dict[int, list[Call]] = {}  # by id() of the Work; in flight
        self._batch: dict[int, list[Call]] = {}  # by thread inside batch_isend_irecv
        self._replaced: dict[Original, Original] = {}
        self._wait: Original = distributed.Work.wait

    def install(self) -> None:
        for name, (op, payload) in COLLECTIVES.items():
            original = getattr(self._c10d, name, None)
            if original is not None:
                self._replaced[original] = self._timed_collective(original, int(op), payload)
        for name, (op, peer, group_peer) in TRANSFERS.items():
            original = getattr(self._c10d, name)
            self._replaced[original] = self._timed_transfer(original, int(op), peer, group_peer)
        batch = self._c10d.batch_isend_irecv
        self._replaced[batch] = self._timed_batch(batch)
        # A P2POp may hold the function as it was before; torch compares by identity.
        check = self._c10d._check_op
        self._c10d._check_op = lambda op: check(self._replaced.get(op, op))
        self._check = check
        _rebind(self._replaced)

    def uninstall(self) -> None:
        """Wrappers that someone still holds pass calls through."""
        if self._recorder is not None:
            self._recorder.owner = 0  # so that all go the general way, which looks for a recorder
        self._recorder = None
        _rebind({wrapper: original for original, wrapper in self._replaced.items()})
        self._c10d._check_op = self._check
        self._work_class.wait = self._wait

    def _begin(
        self,
        op: int,
        process_group: Any,
        payload: Any,
        peer: tuple[Any, Any] | None = None,
    ) -> Call | None:
        """None where there is nothing to time, or where timing it failed: the call goes on."""
        recorder = self._recorder
        if recorder is None:
            return None
        try:
            group = self.channels.group(process_group)
            if group is None:
                return None
            if peer is None:
                return Call(recorder, op, group.group, group, NONE_32, payload)
            rank = self.channels.global_rank(process_group, *peer)
            channel = self.channels.peer(rank, op == Op.RECV)
            return Call(recorder, op, group.group, channel, rank, payload)
        except Exception:
            recorder.failures += 1
            return None

    def _run(self, call: Call, original: Original, args: Any, kwargs: Any) -> Any:
        ident = get_ident()
        owns = call.recorder.owner == ident
        if owns:
            call.recorder.calling = True
        else:
            self._calling.add(ident)
        try:
            return original(*args, **kwargs)
        except BaseException:
            call.unblock()
            raise
        finally:
            if owns:
                call.recorder.calling = False
            else:
                self._calling.discard(ident)

    def _launched(self, call: Call, work: Any) -> None:
        self._launched_together([call], work)

    def _launched_together(self, calls: list[Call], work: Any) -> None:
        """Several calls may share one Work: a coalesced batch of transfers."""
        key = id(work)

        def dropped(_: weakref.ref[Any]) -> None:
            self._works.pop(key, None)
            if self._recorder is not None:  # else a forked child's copy, or after the end
                for call in calls:
                    call.dropped()

        reference = weakref.ref(work, dropped)
        for call in calls:
            call.reference = reference
            if call.action is not None:
                call.action.launched += 1
        self._works[key] = calls
        if self._work_class.wait is self._wait:  # blocking calls wait too, and need no timing
            self._work_class.wait = self._timed_wait()

    def _source_known(self, call: Call, rank: int) -> None:
        """A receive from anyone has its number only now."""
        call.peer = rank
        call.channel = self.channels.peer(rank, True)
        call.sequence = call.channel.enter(call.op, call.started_ns)

    def _guard(self, action: Callable[..., None], *args: Any) -> None:
        """The edge: an error of ours is counted, and the communication goes on."""
        try:
            action(*args)
        except Exception:
            if self._recorder is not None:
                self._recorder.failures += 1

    def _timed_collective(self, original: Original, op: int, payload: str) -> Original:
        group_of = Argument(original, "group")
        async_of = Argument(original, "async_op")
        payload_of = Argument(original, payload)

        common = self._common(original, op, payload, group_of, async_of, payload_of)
        is_compiling = self._is_compiling

        @wraps(original)
        def timed(*args: Any, **kwargs: Any) -> Any:
            return (original if is_compiling() else common)(*args, **kwargs)

        return timed

    def _common(
        self,
        original: Original,
        op: int,
        payload: str,
        group_of: Argument,
        async_of: Argument,
        payload_of: Argument,
    ) -> Original:
        """Times the common calls in C where that was built, all others the general way."""
        general = partial(self._general, op, group_of, async_of, payload_of, original)
        if Collective is None:
            return lambda *args, **kwargs: general(args, kwargs)
        # `GroupMember.WORLD` is this attribute behind two properties, as dear as all the rest.
        holder, default = getattr(self._c10d, "_world", None), "_default_pg"
        if not hasattr(holder, default):
            holder, default = self._c10d.GroupMember, "WORLD"
        made: Original = Collective(
            recorder=self._recorder,
            op=op,
            original=original,
            general=general,
            known=self.channels.known,
            find=self.channels.group,
            holder=holder,
            default=default,
            payload=payload,
            tensor=self._tensor,
            group_at=group_of.position,
            async_at=async_of.position,
            payload_at=payload_of.position,
        )
        return made

    def _general(
        self,
        op: int,
        group_of: Argument,
        async_of: Argument,
        payload_of: Argument,
        original: Original,
        args: Any,
        kwargs: Any,
    ) -> Any:
        """A collective of any thread, on any device, blocking or not."""
        if self._is_inside():
            return original(*args, **kwargs)
        call = self._begin(op, group_of.of(args, kwargs), payload_of.of(args, kwargs))
        if call is None:
            return original(*args, **kwargs)
        if not async_of.of(args, kwargs):
            self._guard(call.block, call.started_ns)
        result = self._run(call, original, args, kwargs)
        if result is None:
            self._guard(call.complete)
        else:
            self._guard(self._launched, call, result)
        return result

    def _is_inside(self) -> bool:
        """Whether this thread is in a timed function already: what it calls belongs to it."""
        recorder = self._recorder
        if recorder is not None and recorder.owner == get_ident():
            return recorder.calling
        return get_ident() in self._calling

    def _timed_transfer(self, original: Original, op: int, peer: str, group_peer: str) -> Original:
        group_of = Argument(original, "group")
        peer_of = Argument(original, peer)
        group_peer_of = Argument(original, group_peer)
        blocking = not original.__name__.startswith("i")

        @wraps(original)
        def timed(*args: Any, **kwargs: Any) -> Any:
            if self._is_compiling() or self._is_inside():
                return original(*args, **kwargs)
            tensor = args[0] if args else kwargs.get("tensor")
            found = (peer_of.of(args, kwargs), group_peer_of.of(args, kwargs))
            call = self._begin(op, group_of.of(args, kwargs), tensor, found)
            if call is None:
                return original(*args, **kwargs)
            if blocking:
                self._guard(call.block, call.started_ns)
            result = self._run(call, original, args, kwargs)
            if blocking:
                if call.peer == NONE_32:
                    self._guard(self._source_known, call, result)
                self._guard(call.complete)
            elif result is not None:
                self._guard(self._launched, call, result)
            batch = self._batch.get(get_ident())
            if batch is not None and not blocking:
                batch.append(call)
            return result

        return timed

    def _timed_batch(self, original: Original) -> Original:
        """Transfers of a batch are seen by the functions in it; some backends return one Work."""

        @wraps(original)
        def timed(operations: Any) -> Any:
            if self._recorder is None or self._is_compiling():
                return original(operations)
            for operation in operations:
                function = getattr(operation, "op", None)
                if function in self._replaced:
                    operation.op = self._replaced[function]
            ident = get_ident()
            calls = self._batch[ident] = []
            try:
                works = original(operations)
            finally:
                del self._batch[ident]
            unseen = [call for call in calls if call.reference is None]
            if unseen and works:
                self._guard(self._launched_together, unseen, works[0])
            return works

        return timed

    def _timed_wait(self) -> Original:
        original = self._wait

        @wraps(original)
        def wait(work: Any, *args: Any, **kwargs: Any) -> Any:
            calls = self._works.pop(id(work), None)
            if calls is None or self._recorder is None:
                return original(work, *args, **kwargs)
            completed = work.is_completed()
            for call in calls:
                self._guard(call.wait, completed)
            try:
                result = original(work, *args, **kwargs)
            except BaseException:  # it is still not complete, and the state page says so
                for call in reversed(calls):
                    self._guard(call.unblock)
                raise
            for call in reversed(calls):
                self._guard(call.complete_work)
            return result

        return wait


def _size(payload: Any) -> int:
    """Bytes of a tensor or of a list of them; 0 for none."""
    if payload is None:
        return 0
    if type(payload) is list or type(payload) is tuple:
        return sum(tensor.nbytes for tensor in payload)
    size: int = payload.nbytes
    return size


def _rebind(replacements: Mapping[Original, Original]) -> None:
    """Put each replacement wherever a loaded module holds the function.

    Under whatever name in a user's module, under its own in torch's many; never in torch's
    compiler, which compares by identity.
    """
    others = {id(function): other for function, other in replacements.items()}
    own_names = [function.__name__ for function in replacements]
    for name, module in list(sys.modules.items()):
        space = getattr(module, "__dict__", None)
        if space is None or name.startswith("torch._"):
            continue
        names = own_names if name.partition(".")[0] == "torch" else list(space)
        for key in names:
            other = others.get(id(space.get(key)))
            if other is not None:
                space[key] = other
