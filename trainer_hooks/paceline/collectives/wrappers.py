"""Timed replacements of torch.distributed's functions and of `Work.wait`.

Each function is replaced in every loaded module that holds it, so that a call is timed whoever
makes it. Not timed: what C++ starts itself (DistributedDataParallel's reducer), the traceable
functional collectives, and calls that torch's own functions make inside a timed call.

A blocking collective of the owner thread on the CPU takes the fast path, in C where that was built.
All other calls take the slow path: another thread, a device, an asynchronous call.
"""

from __future__ import annotations

import sys
import weakref
from _thread import get_ident
from collections.abc import Callable, Mapping
from functools import partial, wraps
from typing import Any

from paceline.collectives.call import CommunicationCall
from paceline.collectives.channels import Channels
from paceline.collectives.functions import COLLECTIVES, TRANSFERS, Argument, Function
from paceline.recorder import Recorder
from paceline.writer import Collective
from paceline_wire.spans import NONE_32, Op


class DistributedWrappers:
    """The replacements of torch.distributed's functions, for one recorder."""

    def __init__(self, recorder: Recorder) -> None:
        # Imported here: torch is optional, and slow to load for scripts that do not use it.
        import torch.distributed as distributed  # noqa: PLC0415
        from torch import Tensor  # noqa: PLC0415
        from torch.compiler import is_dynamo_compiling  # noqa: PLC0415
        from torch.distributed import distributed_c10d  # noqa: PLC0415

        self._recorder: Recorder | None = recorder
        self._work_class: Any = distributed.Work
        self._tensor = Tensor
        self._c10d: Any = distributed_c10d
        # Dynamo folds it to True while it traces; `is_compiling` checks more, at 10x the cost.
        self._is_compiling = is_dynamo_compiling
        self.channels = Channels(recorder, distributed_c10d)
        self._threads_in_call: set[int] = set()  # other threads inside a timed function
        self._works: dict[int, list[CommunicationCall]] = {}  # in flight, by id() of the Work
        self._batch: dict[int, list[CommunicationCall]] = {}  # by thread in batch_isend_irecv
        self._replaced: dict[Function, Function] = {}
        self._wait: Function = distributed.Work.wait

    def install(self) -> None:
        """Replace the functions in all loaded modules."""
        for name, (op, payload) in COLLECTIVES.items():
            original = getattr(self._c10d, name, None)
            if original is not None:
                self._replaced[original] = self._timed_collective(original, int(op), payload)
        for name, (op, peer, group_peer) in TRANSFERS.items():
            original = getattr(self._c10d, name)
            self._replaced[original] = self._timed_transfer(original, int(op), peer, group_peer)
        batch = self._c10d.batch_isend_irecv
        self._replaced[batch] = self._timed_batch(batch)
        # A P2POp may hold the original function; torch compares by identity.
        check = self._c10d._check_op
        self._c10d._check_op = lambda op: check(self._replaced.get(op, op))
        self._check = check
        _rebind(self._replaced)

    def uninstall(self) -> None:
        """Restore the functions. A wrapper that the script still holds calls the original."""
        if self._recorder is not None:
            self._recorder.owner = 0  # disables the fast path; the slow path checks `_recorder`
        self._recorder = None
        _rebind({wrapper: original for original, wrapper in self._replaced.items()})
        self._c10d._check_op = self._check
        self._work_class.wait = self._wait

    # One call

    def _begin(
        self,
        op: int,
        process_group: Any,
        payload: Any,
        peer: tuple[Any, Any] | None = None,
    ) -> CommunicationCall | None:
        """Start timing a call. Return None if it cannot be timed; the call then runs untimed."""
        recorder = self._recorder
        if recorder is None:
            return None
        try:
            group = self.channels.group(process_group)
            if group is None:
                return None
            if peer is None:
                return CommunicationCall(recorder, op, group.group, group, NONE_32, payload)
            rank = self.channels.global_rank(process_group, *peer)
            channel = self.channels.peer(rank, op == Op.RECV)
            return CommunicationCall(recorder, op, group.group, channel, rank, payload)
        except Exception:
            recorder.failures += 1
            return None

    def _run(self, call: CommunicationCall, original: Function, args: Any, kwargs: Any) -> Any:
        ident = get_ident()
        owns = call.recorder.owner == ident
        if owns:
            call.recorder.in_call = True
        else:
            self._threads_in_call.add(ident)
        try:
            return original(*args, **kwargs)
        except BaseException:
            call.unblock()
            raise
        finally:
            if owns:
                call.recorder.in_call = False
            else:
                self._threads_in_call.discard(ident)

    def _is_in_call(self) -> bool:
        """Return whether this thread is in a timed function: calls inside are not timed."""
        recorder = self._recorder
        if recorder is not None and recorder.owner == get_ident():
            return recorder.in_call
        return get_ident() in self._threads_in_call

    def _watch_work(self, calls: list[CommunicationCall], work: Any) -> None:
        """Complete calls when their Work does. A coalesced batch of transfers shares one Work."""
        key = id(work)

        def on_deleted(_: weakref.ref[Any]) -> None:
            self._works.pop(key, None)
            if self._recorder is not None:  # None in a forked child, and after `finish`
                for call in calls:
                    call.drop()

        reference = weakref.ref(work, on_deleted)
        for call in calls:
            call.reference = reference
            if call.action is not None:
                call.action.launched += 1
        self._works[key] = calls
        if self._work_class.wait is self._wait:  # only now: blocking calls use `Work.wait` too
            self._work_class.wait = self._timed_wait()

    def _set_source(self, call: CommunicationCall, rank: int) -> None:
        """Set the peer of a receive from any rank, which is unknown until it returns."""
        call.peer = rank
        call.channel = self.channels.peer(rank, True)
        call.sequence = call.channel.enter(call.op, call.started_ns)

    def _guard(self, action: Callable[..., None], *args: Any) -> None:
        """Count an error of Paceline and let the communication continue."""
        try:
            action(*args)
        except Exception:
            if self._recorder is not None:
                self._recorder.failures += 1

    # Replacements

    def _timed_collective(self, original: Function, op: int, payload: str) -> Function:
        group_of = Argument(original, "group")
        async_of = Argument(original, "async_op")
        payload_of = Argument(original, payload)

        fast_path = self._fast_path(original, op, payload, group_of, async_of, payload_of)
        is_compiling = self._is_compiling

        @wraps(original)
        def timed(*args: Any, **kwargs: Any) -> Any:
            return (original if is_compiling() else fast_path)(*args, **kwargs)

        return timed

    def _fast_path(
        self,
        original: Function,
        op: int,
        payload: str,
        group_of: Argument,
        async_of: Argument,
        payload_of: Argument,
    ) -> Function:
        """Return the C version of this collective, or the slow path where that was not built."""
        slow_path = partial(self._slow_path, op, group_of, async_of, payload_of, original)
        if Collective is None:
            return lambda *args, **kwargs: slow_path(args, kwargs)
        # `GroupMember.WORLD` reads this attribute through two properties, which cost as much as
        # the rest of the fast path.
        owner, name = getattr(self._c10d, "_world", None), "_default_pg"
        if not hasattr(owner, name):
            owner, name = self._c10d.GroupMember, "WORLD"
        collective: Function = Collective(
            recorder=self._recorder,
            op=op,
            original=original,
            slow_path=slow_path,
            channels=self.channels.by_group,
            find_channel=self.channels.group,
            default_owner=owner,
            default_name=name,
            payload=payload,
            tensor=self._tensor,
            group_position=group_of.position,
            async_position=async_of.position,
            payload_position=payload_of.position,
        )
        return collective

    def _slow_path(
        self,
        op: int,
        group_of: Argument,
        async_of: Argument,
        payload_of: Argument,
        original: Function,
        args: Any,
        kwargs: Any,
    ) -> Any:
        """Time a collective of any thread, on any device, blocking or not."""
        if self._is_in_call():
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
            self._guard(self._watch_work, [call], result)
        return result

    def _timed_transfer(self, original: Function, op: int, peer: str, group_peer: str) -> Function:
        group_of = Argument(original, "group")
        peer_of = Argument(original, peer)
        group_peer_of = Argument(original, group_peer)
        blocking = not original.__name__.startswith("i")

        @wraps(original)
        def timed(*args: Any, **kwargs: Any) -> Any:
            if self._is_compiling() or self._is_in_call():
                return original(*args, **kwargs)
            tensor = args[0] if args else kwargs.get("tensor")
            ranks = (peer_of.of(args, kwargs), group_peer_of.of(args, kwargs))
            call = self._begin(op, group_of.of(args, kwargs), tensor, ranks)
            if call is None:
                return original(*args, **kwargs)
            if blocking:
                self._guard(call.block, call.started_ns)
            result = self._run(call, original, args, kwargs)
            if blocking:
                if call.peer == NONE_32:
                    self._guard(self._set_source, call, result)
                self._guard(call.complete)
            elif result is not None:
                self._guard(self._watch_work, [call], result)
            batch = self._batch.get(get_ident())
            if batch is not None and not blocking:
                batch.append(call)
            return result

        return timed

    def _timed_batch(self, original: Function) -> Function:
        """Time a batch through the functions in it; some backends return one Work for all."""

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
            unwatched = [call for call in calls if call.reference is None]
            if unwatched and works:
                self._guard(self._watch_work, unwatched, works[0])
            return works

        return timed

    def _timed_wait(self) -> Function:
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
            except BaseException:  # not complete: the state page keeps showing it as entered
                for call in reversed(calls):
                    self._guard(call.unblock)
                raise
            for call in reversed(calls):
                self._guard(call.complete_work)
            return result

        return wait


def _rebind(replacements: Mapping[Function, Function]) -> None:
    """Replace each function in every loaded module that holds it.

    In a user's module under any name; in torch's many modules only under its own name; never in
    torch's compiler, which compares by identity.
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
