"""Record the schedules of `torch.distributed.pipelining` as `paceline.pipelining` would.

Stages, chunks and microbatches are those of the stage that torch runs. Works for every schedule of
torch and for a user's own: all run their actions through the same few functions.
"""

from __future__ import annotations

import sys
from _thread import get_ident
from collections.abc import Callable, Iterator
from typing import Any

from paceline.sections import Transfer
from paceline.session import Session, log_once
from paceline.wrapping import after, instances, loaded, replace
from paceline.writer.interface import Timed
from paceline_wire.spans import Op

_SCHEDULES = "torch.distributed.pipelining.schedules"
_STAGE = "torch.distributed.pipelining.stage"
# Names that the server knows; of other classes their own name.
_NAMES = {
    "ScheduleGPipe": "gpipe",
    "Schedule1F1B": "1f1b",
    "ScheduleInterleaved1F1B": "interleaved",
    "ScheduleLoopedBFS": "looped_bfs",
    "ScheduleInterleavedZeroBubble": "interleaved_zero_bubble",
    "ScheduleZBVZeroBubble": "zbv_zero_bubble",
    "ScheduleDualPipeV": "dualpipev",
}
_COMPUTE = {
    "forward_one_chunk": Op.FORWARD,
    "backward_one_chunk": Op.BACKWARD,
    "backward_weight_one_chunk": Op.BACKWARD_WEIGHT,
}
_TRANSFERS = {
    "get_fwd_recv_ops": Op.FORWARD_RECV,
    "get_fwd_send_ops": Op.FORWARD_SEND,
    "get_bwd_recv_ops": Op.BACKWARD_RECV,
    "get_bwd_send_ops": Op.BACKWARD_SEND,
}
_TAG = "_paceline_transfer"


class ScheduleRecognizer:
    """Records the schedules of the current session."""

    def __init__(
        self, find_session: Callable[[], Session | None], on_stage: Callable[[Any], None]
    ) -> None:
        """`on_stage`: called with the stages of each schedule."""
        self._find_session = find_session
        self._on_stage = on_stage

    def recognize(self) -> None:
        """Record the schedules that exist and those created later, if the module is loaded."""
        stage, schedules = loaded(_STAGE, "_PipelineStageBase"), sys.modules.get(_SCHEDULES)
        if stage is None or schedules is None:
            return
        for name, op in _COMPUTE.items():
            replace(stage, name, self._timed(op))
        for name, op in _TRANSFERS.items():
            replace(stage, name, self._tagged(op))
        for name in ("PipelineScheduleSingle", "PipelineScheduleMulti"):
            kind = loaded(_SCHEDULES, name)
            if kind is not None:
                after(kind, "__init__", lambda _, schedule, *__: self._describe(schedule))
        replace(schedules, "_batch_p2p", self._launched)
        for schedule in instances(loaded(_SCHEDULES, "_PipelineSchedule")):
            self._describe(schedule)

    def _describe(self, schedule: Any) -> None:
        session = self._find_session()
        stages = getattr(schedule, "_stages", None) or [schedule._stage]
        if session is None:
            return
        kind = type(schedule).__name__
        if kind != "_ScheduleForwardOnly":  # an evaluation
            session.update(
                source="torch.distributed.pipelining",
                metadata={
                    "schedule": _NAMES.get(kind, kind),
                    "microbatches": str(schedule._n_microbatches),
                    "virtual_stages": str(len(stages)),
                },
            )
        for stage in stages:
            self._on_stage(stage)

    def _timed(self, op: Op) -> Callable[[Any], Any]:
        def make(original: Any) -> Any:
            def run(stage: Any, *args: Any, **kwargs: Any) -> Any:
                action = self._action(stage, op, args, kwargs)
                if action is None:
                    return original(stage, *args, **kwargs)
                before = self._backwards()
                with action:
                    result = original(stage, *args, **kwargs)
                if op == Op.BACKWARD and self._backwards() == before:
                    self._count_backward()
                return result

            return run

        return make

    def _action(self, stage: Any, op: Op, args: Any, kwargs: Any) -> Timed | None:
        session = self._usable()
        if session is None:
            return None
        try:
            if op != Op.FORWARD and not stage.has_backward:
                return None
            microbatch = _microbatch(args, kwargs)
            chunk = stage.stage_index // stage.group_size
            actions = session.recognized_actions
            found = actions[op].get((microbatch, chunk, None))
            if found is not None:
                return found
            return session.add_action(actions, op, microbatch, chunk, None)
        except Exception as error:
            session.recorder.failures += 1
            log_once("stage", "paceline: a pipeline action is not recorded: %s", error)
            return None

    def _backwards(self) -> int:
        session = self._find_session()
        return 0 if session is None else session.loop.backwards

    def _count_backward(self) -> None:
        session = self._find_session()
        if session is not None:
            session.guard(session.backward_ran)

    def _usable(self) -> Session | None:
        """Return the session if this thread trains and the script does not annotate itself."""
        session = self._find_session()
        if session is None or session.annotates or get_ident() != session.recorder.owner:
            return None
        return session

    def _tagged(self, op: Op) -> Callable[[Any], Any]:
        """Mark the transfers of a microbatch, which are launched later, several at once."""

        def make(original: Any) -> Any:
            def ops(stage: Any, *args: Any, **kwargs: Any) -> Any:
                result = original(stage, *args, **kwargs)
                try:
                    tag = op, _microbatch(args, kwargs), stage.stage_index // stage.group_size
                    for each in result:
                        setattr(each, _TAG, tag)
                except Exception as error:
                    log_once("transfer", "paceline: a transfer has no microbatch: %s", error)
                return result

            return ops

        return make

    def _launched(self, original: Any) -> Any:
        def batch_p2p(p2p_ops: Any, *args: Any, **kwargs: Any) -> Any:
            if self._usable() is not None and type(p2p_ops) is list:
                p2p_ops = _Launches(p2p_ops, self._transfer)
            return original(p2p_ops, *args, **kwargs)

        return batch_p2p

    def _transfer(self, p2p_op: Any) -> Transfer | None:
        """Return the action in which this transfer is launched."""
        session, tag = self._usable(), getattr(p2p_op, _TAG, None)
        if session is None or tag is None:
            return None
        op, microbatch, chunk = tag
        actions = session.recognized_actions[op]
        found = actions.get((microbatch, chunk, None))
        if found is None:
            found = Transfer(session.recorder, op, microbatch, chunk, None)
            actions[microbatch, chunk, None] = found
        return found if isinstance(found, Transfer) else None


class _Launches(list[Any]):
    """Transfers; each is the session's open action while a loop over them is at it.

    What the loop launches is recorded as that action. The list is otherwise the same.
    """

    def __init__(self, ops: list[Any], transfer_of: Callable[[Any], Transfer | None]) -> None:
        super().__init__(ops)
        self._transfer_of = transfer_of

    def __iter__(self) -> Iterator[Any]:
        for op in super().__iter__():
            action = self._transfer_of(op)
            if action is None:
                yield op
                continue
            action.__enter__()
            try:
                yield op
            finally:
                if action.completed:
                    action.__exit__(None, None, None)
                else:  # it is recorded when it completes
                    action.close()


def _microbatch(args: Any, kwargs: Any) -> int:
    return int(args[0] if args else next(iter(kwargs.values())))
