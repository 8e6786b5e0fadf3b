"""`Checkpoints`: the state of a script, which `paceline.steps(loader, state=...)` saves."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any, Literal
from weakref import WeakMethod, finalize, ref

import msgspec
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader

from paceline import hooks, requests
from paceline.agreement import Agreement, Request, store_of_process_group
from paceline.checkpoints.errors import CheckpointError, OtherRunError
from paceline.checkpoints.interval import CheckpointInterval
from paceline.checkpoints.layout import Saved, claim_next, run_of, saved_checkpoints
from paceline.checkpoints.memory.captures import Captures
from paceline.checkpoints.memory.copies import (
    MemoryCopies,
    end_dropped,
    end_dropped_at_exit,
    open_copies,
)
from paceline.checkpoints.memory.file import CopyFile
from paceline.checkpoints.memory.state import MemoryState
from paceline.checkpoints.parts import (
    ModulePart,
    ObjectPart,
    OptimizerPart,
    StatePart,
    optimizers_of,
    part_of,
)
from paceline.checkpoints.position import DataPosition, batches_of, has_begun
from paceline.checkpoints.power_sgd import PowerSGD
from paceline.checkpoints.random_states import RandomStates
from paceline.checkpoints.rank_group import RankGroup, reason_of
from paceline.checkpoints.replicas import ReplicaCheck, replica_sets
from paceline.checkpoints.roll_back import SkippingBatches, go_back, roll_back_of, skip_of
from paceline.checkpoints.states import StoredState, capture
from paceline.checkpoints.storage import Checkpointer, Verified
from paceline.environment import launched_world_size
from paceline_wire.ring import ControlKind

_log = logging.getLogger(__name__)

# A rank that never comes to a save lets the others wait for it for so long at least, in their
# threads.
_TIMEOUT = timedelta(minutes=10)
# Optimizer steps without a loop that has the state. A script may make a few before its loop, for
# example to create the optimizer's state.
_UNUSED_STEPS = 10
# Batches without any optimizer step. Few scripts accumulate the gradients of more.
_UNUSED_BATCHES = 256
_POSITION = "position"
_LOADER = "loader"


class Checkpoints:
    """The state of a training script: saved while it trains, and loaded when it starts again.

    `paceline.steps(loader, state=...)` loads the best checkpoint before its first batch, saves
    every `every` steps and on request of the server, and ends on request after all ranks have saved
    the same step. A checkpoint that cannot be saved is reported, and training continues.

    All ranks create it at the same place, after `init_process_group`. If the script runs several
    epochs, `steps` yields nothing for those that were completed before; `epochs` leaves them out.

    Example:
        >>> state = paceline.Checkpoints("/ckpt", model=model, optimizer=optimizer)
        >>> for batch in paceline.steps(loader, state=state):
        ...     train(batch)
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        every: int | None = None,
        keep: int = 3,
        memory: bool | Literal["auto"] = "auto",
        **state: Any,
    ) -> None:
        """Claim the directory.

        Args:
            directory: shared by all ranks.
            every: steps between checkpoints; 0: only on request; default: one every 10 minutes,
                or at the advised interval if the policy of the job allows it.
            keep: number of checkpoints to keep.
            memory: whether the state is also copied to the memory of this node and of another one,
                every few steps, for a restart after a crash. "auto": if there is room; the reason
                why not is logged. True: it is also reported as an incident.
            **state: what to save, by name: modules, lists of modules (the stages of a pipeline),
                optimizers, tensors, random generators, dicts and anything with `state_dict` and
                `load_state_dict`, such as schedulers, scalers and loaders. Random generators and
                the position in the data are saved in any case.

        Raises:
            CheckpointError: the directory cannot be used.
            TypeError: an object has no state.
            ValueError: an argument is not valid.
        """
        if every is not None and every < 0:
            raise ValueError(f"every must be a number of steps of at least 0, got {every}")
        if not isinstance(memory, int | str) or memory not in (True, False, "auto"):
            raise ValueError(
                f'memory must be True, False or "auto", got a value of type '
                f"{type(memory).__name__}: a part of the state needs another name"
            )
        if _POSITION in state:
            raise ValueError(f"the name {_POSITION!r} is Paceline's own: choose another one")
        hooks.start_if_asked()
        directory = Path(directory).absolute()  # the script may change its working directory
        group = _new_group()
        self._is_alone = group is None
        self.step = 0  # completed steps
        self._driver = requests.RequestDriver()
        self.resumed_step: int | None = None  # step of the loaded checkpoint; None: without one
        # Where it was: memory (of this node, on all ranks), peer (of another node) or disk.
        self.resumed_from: Literal["memory", "peer", "disk"] | None = None
        self._every = every
        self._position = DataPosition()
        self._epoch: int | None = None  # the last one that `epochs` yielded
        self._parts: dict[str, StatePart] = {}
        self._optimizer_steps = 0
        self._steps_before = 0  # value of the above at the last boundary
        self._counts_optimizers = False
        self._untrained = 0  # batches before the first optimizer step
        self._add_parts(state)
        self._found: Verified | None = None  # to be loaded from disk
        self._found_copy: CopyFile | None = None  # to be loaded from memory
        self._saved_position: dict[str, Any] | None = None
        self._is_searched = False
        self._taken = False  # a batch, since the last step that was counted
        self._wants_save = False  # by `save`, in the middle of a step
        self._acted_step = 0  # the last one after which it was decided whether to save or to stop
        self._agreement: Agreement | None = None
        self._wants_stop = False  # requested before there was an agreement
        self._saved_at = monotonic()
        self._interval = CheckpointInterval(os.environ)
        self._skip = skip_of(os.environ)
        self._batches: SkippingBatches | None = None  # batches of the epoch in progress
        peers = RankGroup(group)
        generation, run, went_back = 0, "", False
        request = roll_back_of(os.environ)

        def claim() -> None:
            nonlocal generation, run, went_back
            try:
                generation = claim_next(directory)
                run = run_of(directory)
            except OSError as error:
                raise CheckpointError(
                    f"nothing can be saved in {directory}: {error.strerror}. Make it writable, "
                    "with free space, or name another directory"
                ) from error
            went_back = request is not None and go_back(directory, request)

        failure = peers.attempt(claim) if peers.rank == 0 else None
        claimed = peers.from_first((failure, generation, run, went_back))
        failure, generation, run, went_back = claimed
        if failure:
            raise CheckpointError(failure)
        self._checkpointer = Checkpointer(
            directory, group, generation, run={}, keep=keep, on_result=self._saved
        )
        requests.before_end(self._checkpointer.wait)
        requests.before_end(self._end_replicas)
        self._copies = None
        requests.at_leave(self._leave)
        if memory:
            self._copies = open_copies(
                peers,
                run,
                generation,
                Captures(self._whole()),
                partial(_report_no_copies, is_incident=memory is True),
            )
        if self._copies is not None and went_back:
            self._copies.resumed(None)  # they may contain the damage
            peers.gather(None)  # no rank searches before all are deleted
        hooks.describe_repair(roll_back=True)
        self._replicas = None if group is None else self._open_replicas(f"{run}/{generation}")
        if self._copies is not None:
            watched = ref(self)
            hooks.watch_exit(
                lambda: None if (state := watched()) is None else state.step,
                WeakMethod(self._position.exits),
            )
            requests.before_end(self._end_copies)
            requests.before_end(end_dropped)
            # Many scripts do not destroy their process group.
            requests.at_exit(self._end_at_exit)
            requests.at_exit(end_dropped_at_exit)
        kept = self._copies, self._replicas, self._position, self._driver
        finalize(self, _drop, *kept, is_alone=group is None).atexit = False

    def _open_replicas(self, training: str) -> ReplicaCheck | None:
        """Begin to compare replicas, if this rank has any and the user has not turned it off.

        `training`: a name that no other training of this job has in the store.
        """
        if os.environ.get("PACELINE_REPLICA_CHECK") == "0":
            return None
        try:
            sets = replica_sets(_modules_of(self._parts))
            if not sets:
                return None
            store = store_of_process_group(dist, f"replicas/{training}")
            return None if store is None else ReplicaCheck(sets, dist.get_rank(), store)
        except Exception as error:  # training never fails for it
            _log.warning("Replicas are not compared: %s", error)
            return None

    def _compare_replicas(self) -> None:
        check = self._replicas
        if check is None:
            return
        try:
            check.step_ended(self.step)
            while not check.mismatches.empty():
                hooks.replicas_differ(msgspec.json.encode(check.mismatches.get()).decode())
        except Exception as error:
            _log.warning("Replicas are no longer compared: %s", error)
            self._replicas = None

    def _end_replicas(self) -> None:
        check, self._replicas = self._replicas, None
        if check is not None:
            check.close()

    def _add_parts(self, state: Mapping[str, Any]) -> None:
        parts: dict[str, StatePart] = {}
        names = partial(_parameter_names, self._parts)
        for name, value in state.items():
            if not name.isidentifier():
                raise ValueError(f"the name of a state must be an identifier, got {name!r}")
            has_state = hasattr(value, "state_dict") and hasattr(value, "load_state_dict")
            if name == _LOADER or isinstance(value, DataLoader):
                # Accelerate's loaders have these methods also without a state, and read one batch
                # ahead, so that after the last batch of an epoch their state is of the next one.
                if has_state and not hasattr(value, "use_stateful_dataloader"):
                    parts[name] = ObjectPart(value, is_local=True)
                    if isinstance(value, DataLoader):
                        self._position.stateful.append(value)
                else:
                    self._position.loaders.append(value)
                continue  # the position in others is counted
            if PowerSGD.fits(value):
                continue
            part = parts[name] = part_of(name, value, names)
            if isinstance(part, OptimizerPart):
                self._position.optimizers.append(part.value)
        modules = _modules_of(parts)
        for name, value in state.items():
            if PowerSGD.fits(value):
                parts[name] = ObjectPart(PowerSGD(name, value, modules), is_local=True)
        optimizers = {id(each): each for value in state.values() for each in optimizers_of(value)}
        self._counts_optimizers = bool(optimizers)
        for optimizer in optimizers.values():
            # Weak: the threads of copies have the optimizer, which must not keep this object.
            optimizer.register_step_post_hook(partial(_call, WeakMethod(self._stepped)))
        # Modules first: reading a module's state makes FSDP2 use its own parameters again.
        self._parts |= sorted(parts.items(), key=lambda item: not isinstance(item[1], ModulePart))

    def _stepped(self) -> None:
        self._optimizer_steps += 1
        if self._optimizer_steps == _UNUSED_STEPS and self._position.epoch < 0:
            _log.warning(
                "The optimizer has made %d steps in a loop without this state, so nothing is "
                "resumed, and nothing saved by itself: use paceline.steps(loader, state=state).",
                _UNUSED_STEPS,
            )

    # For scripts

    def epochs(self, count: int) -> Iterator[int]:
        """Yield the numbers of the epochs that are left of `count`, until a request to stop.

        Example:
            >>> for epoch in state.epochs(10):
            ...     for batch in paceline.steps(loader, state=state):
            ...         train(batch)
        """
        if self._position.epoch >= 0 or self._epoch is not None:
            raise ValueError(
                "Checkpoints.epochs counts the loops with this state, and some were before it: for "
                "several phases use `for epoch in range(...)`; `steps` then yields nothing for "
                "epochs that were completed"
            )
        self._search()
        saved = self._saved_position
        first = 0 if saved is None else int(saved["epoch"]) + _is_over(saved)
        if saved is not None and first >= count:
            self._restore(saved)  # no loop will
        elif saved is not None and _is_over(saved) and self._fits(saved):
            # Before what the script does at the begin of the epoch, which was not saved.
            self._position.epoch = saved["epoch"]
            self._restore(saved)
        for self._epoch in range(first, count):
            if self.stopped:
                return
            self._position.epoch = self._epoch - 1  # also after an epoch without a loop
            self._position.is_last = self._epoch == count - 1
            yield self._epoch

    def save(self) -> None:
        """Start a checkpoint of the current step, on all ranks; training continues meanwhile.

        In the body of a loop, call it at the end: the optimizer's step for the batch is included.
        While gradients are accumulated, the checkpoint is made after the step that uses them.
        Nothing is saved before the checkpoint to resume from is loaded, such as after an epoch
        that was completed before.
        """
        self._search()
        saved = self._saved_position
        if saved is not None:
            if _is_over(saved) and self._position.epoch == saved["epoch"]:
                self._restore(saved)  # where it was saved: what the script does next was not
            return
        self._count_step()
        if self._taken and self._position.accumulates():
            # Random states and buffers of now are those after batches that a resume takes again.
            self._wants_save = True
            return
        with hooks.checkpoint():
            self._save()

    @property
    def stopped(self) -> bool:
        """Whether all ranks end their loops on request."""
        return self._driver.stopped

    @property
    def batches(self) -> int:
        """Number of batches of this epoch that were taken, also before a resume.

        `enumerate` counts those since the resume.

        Example:
            >>> for batch in paceline.steps(loader, state=state):
            ...     loss(batch).backward()
            ...     if state.batches % 4 == 0 or state.batches == len(loader):
            ...         optimizer.step()
        """
        return self._position.batches

    def wait(self) -> bool:
        """Wait for the checkpoint in progress, if any. Return whether it was committed."""
        return self._checkpointer.wait()

    def request_stop(self) -> None:
        """Have all ranks save and end their loops at one step; for a signal handler of one rank.

        Example:
            >>> signal.signal(signal.SIGTERM, lambda *_: state.request_stop())
        """
        self._wants_stop = self._agreement is None
        if self._agreement is not None:
            self._agreement.request(ControlKind.CHECKPOINT_AND_STOP)

    # For the loop

    def begin(self, loader: Iterable[Any]) -> Iterator[Any]:
        """Begin an epoch, at the saved position if this is the epoch to resume.

        Raises:
            CheckpointError: the checkpoint cannot be loaded: training must not begin again.
            ValueError: the ranks may make different numbers of steps, a parameter has no shape yet,
                or this is no epoch.
        """
        if self.stopped:
            return iter(())
        self._refuse_models()
        if self._epoch is not None and self._position.epoch >= self._epoch:
            raise ValueError(
                "Checkpoints.epochs allows one loop with this state per epoch: leave out `state` "
                "in an evaluation, and for several loops use `for epoch in range(...)`"
            )
        if self._position.epoch < 0 and has_begun(loader):
            _log.warning(
                "paceline.steps was given a %s that has begun to read a DataLoader, so that a "
                "resume does not restore the order of its data and the random numbers of its "
                "workers: pass the loader itself, or a generator function that reads it.",
                type(loader).__name__,
            )
        self._search()
        self._taken = False
        self._steps_before = self._optimizer_steps
        if self._agreement is None:
            self._agreement = requests.drive(self._driver)
            if self._wants_stop:
                self.request_stop()
        saved = self._saved_position
        if saved is None:
            batches = self._position.begin(loader)
        elif self._position.epoch + 1 < saved["epoch"]:
            self._position.epoch += 1  # an epoch that was completed before
            return iter(())
        else:
            batches = self._resume(loader, saved)
        if self._batches is not None:
            self._batches.is_replaced = True
        self._batches = SkippingBatches(batches)
        self._skip_if_due()
        return iter(()) if self._act() else self._batches

    def _refuse_models(self) -> None:
        for name, part in self._parts.items():
            if not isinstance(part, ModulePart):
                continue
            if (parameter := part.uninitialized()) is not None:
                raise ValueError(
                    f"{name}.{parameter} has no shape before the first batch, so that no "
                    "checkpoint can be loaded into it: run the model once before paceline.steps, "
                    "such as under torch.no_grad()"
                )
            if part.allows_uneven_steps():
                raise ValueError(
                    f"inside {name}.join() ranks make different numbers of steps, so that there is "
                    "none at which all can save: leave it out and give all ranks as many batches, "
                    "or pass throw_on_early_termination=True"
                )

    def boundary(self) -> bool:
        """Save if it is time. Return whether the loop ends on request.

        Called between two batches; it acts only after an optimizer step.
        """
        if self.stopped:
            return True
        self._count_step()
        stops = self.step != self._acted_step and self._act()
        self._skip_if_due()  # after the save, so that a resume at this step skips, too
        return stops

    def _skip_if_due(self) -> None:
        """Leave out the data that the server asked to leave out."""
        skip, batches = self._skip, self._batches
        if skip is None or batches is None or self.step != skip.first:
            return
        self._skip = None
        count = skip.steps * self._position.batches_per_step
        batches.skip(count)
        if self._checkpointer.peers.rank == 0:
            _log.warning("The data of %d steps (%d batches) is left out.", skip.steps, count)

    def _count_step(self) -> None:
        """Count the step that ended with the batch taken last, if it ended one."""
        has_stepped = not self._counts_optimizers or self._optimizer_steps > self._steps_before
        if not self._taken or not has_stepped:
            return  # gradients are still accumulated
        self._taken = False
        self._steps_before = self._optimizer_steps
        self.step += 1
        self._position.step_ended()

    def _act(self) -> bool:
        """Save if it is time. Return whether the loop ends on request."""
        before, self._acted_step = self._acted_step, self.step
        if self.step != before:
            self._compare_replicas()
            if self._copies is not None:
                self._copies.step_ended(self.step)
        agreement = self._agreement
        request = None if agreement is None else agreement.at(self.step)
        if request is None and not self._is_due(before):
            return False
        with hooks.checkpoint():
            if request is None or request.wants_checkpoint:
                self._save()
            if request is not None:
                self._finish(request)
        return self.stopped

    def took(self) -> None:
        """Note that a batch was taken."""
        skipped = 0 if self._batches is None else self._batches.take_skipped()
        self._position.took(skipped)
        self._taken = True
        if not self._counts_optimizers or self._optimizer_steps:
            return
        self._untrained += 1
        if self._untrained == _UNUSED_BATCHES:
            _log.warning(
                "The optimizer has made no step in %d batches, and until it does, nothing is saved "
                "by itself: give Checkpoints the one whose step() is called.",
                _UNUSED_BATCHES,
            )

    def end(self) -> None:
        """End the epoch. A step that was followed by `break` is counted here."""
        if self._counts_optimizers:
            self._count_step()
        self._taken = False
        self._position.is_over = self._batches is not None and self._batches.is_over
        if self._position.is_over:
            if self._wants_save:  # no step follows in this epoch: all ranks have used up their data
                with hooks.checkpoint():
                    self._save()
        elif not self.stopped:
            self._position.left()
        if self._agreement is not None:
            self._agreement.leave()

    def _is_due(self, before: int) -> bool:
        """Return whether to save after this step; `before`: the last one for which it was asked."""
        if self._wants_save:
            return True
        if self._every is not None:
            return self._every > 0 and self.step // self._every > before // self._every
        if self._agreement is not None and self._checkpointer.peers.rank == 0:
            now = monotonic()
            if now - self._saved_at > self._interval.seconds():
                self._saved_at = now
                self._agreement.request(ControlKind.CHECKPOINT)
        return False

    def _finish(self, request: Request) -> None:
        assert self._agreement is not None, "the request is from there"
        done = not request.wants_checkpoint or self._checkpointer.wait()
        self._driver.stopped = self._agreement.finish(request, done)

    # Saving and loading

    def _saved(self, step: int, failure: str | None) -> None:
        """Report the result of a save; called in the thread of the checkpointer."""
        if failure is None:
            hooks.checkpoint_saved(step)
            if self._copies is not None:
                self._copies.disk = Saved(self._checkpointer.generation, step)
        else:
            hooks.checkpoint_failed(failure)

    def _whole(self) -> dict[str, StatePart]:
        return self._parts | {_POSITION: ObjectPart(self._position)}

    def _leave(self) -> None:
        """End the threads; this generation ends without this process's end."""
        self._checkpointer.abandon()
        self._end_replicas()
        if self._copies is not None:
            self._copies.abandon()

    def _end_copies(self) -> None:
        if self._copies is not None:
            is_left = self.stopped or self._position.is_left_by_exit
            self._copies.close_at_end(is_complete=self._is_searched and not is_left)

    def _end_at_exit(self) -> None:
        if self._copies is not None:
            is_over = _is_over_at_exit(self._position, self._driver, is_alone=self._is_alone)
            self._copies.close_at_end(is_complete=is_over)

    def _save(self) -> None:
        self._saved_at = started = monotonic()
        self._wants_save = False
        state, failure = dict[str, Tensor](), None
        try:
            state = capture(self._whole())
        except Exception as error:  # raised by the script's own objects: training continues
            failure = f"{reason_of(error)} (rank {self._checkpointer.peers.rank})"
        self._checkpointer.save(self.step, state, failure)
        self._interval.saved(monotonic() - started)

    def _search(self) -> None:
        """Choose the checkpoint to resume from, and read its position."""
        if self._is_searched:
            return
        self._is_searched = True
        if self._copies is not None:
            self._search_copies()
        if self._found_copy is not None:
            self._saved_position = MemoryState(self._found_copy).tree(_POSITION)
            return
        found = self._found = self._checkpointer.find()
        if found is not None:
            self.resumed_from = "disk"
            stored = StoredState(self._checkpointer, found)
            self._saved_position = stored.tree(_POSITION)
            return
        self._warn_if_one_was_saved()
        if self._copies is not None:
            self._copies.resumed(None)

    def _warn_if_one_was_saved(self) -> None:
        """No error: a script may have several directories, or one for each phase."""
        saved, checkpointer = os.environ.get("PACELINE_SAVED_STEP") or "0", self._checkpointer
        if saved != "0" and checkpointer.peers.rank == 0:
            _log.warning(
                "The job has saved step %s, and %s contains no checkpoint: the training begins at "
                "its first step. Is the shared directory mounted on the nodes?",
                saved,
                checkpointer.directory,
            )

    def _search_copies(self) -> None:
        copies, peers = self._copies, self._checkpointer.peers
        assert copies is not None, "called only then"
        disk = saved_checkpoints(self._checkpointer.directory) if peers.rank == 0 else []
        disk = peers.from_first(disk)

        def unfit(copy: CopyFile) -> str | None:
            state = MemoryState(copy)
            epoch = state.tree(_POSITION)["epoch"]
            return state.unfit(self._whole(), may_add_parameters=epoch > 0)

        found = copies.find(disk, unfit)
        copies.disk = disk[0] if disk else None
        if found is not None:
            choice, self._found_copy = found
            self.resumed_from = "peer" if copies.is_from_peer(choice) else "memory"

    def _resume(self, loader: Iterable[Any], saved: dict[str, Any]) -> Iterator[Any]:
        """Load the state, and return to its position in the data."""
        loaded, world_size = self._restore(saved)
        size = self._checkpointer.peers.size
        is_same_rank = world_size == size
        if _is_over(saved):
            if self._position.epoch < saved["epoch"]:
                self._position.epoch = saved["epoch"]
                self._position.watch(loader)
                self._saved_position = saved  # again, after what the script does between epochs
                return iter(())
            return self._position.begin(loader)
        if is_same_rank:
            self._warn_if_of_another_length(loader, saved["began_with"].get("length"))
        return self._position.resume(
            loader,
            saved,
            has_state=not loaded.isdisjoint({_LOADER, *self._names_of(loader)}),
            batches=saved["batches"] * world_size // size,
            is_same_rank=is_same_rank,
        )

    def _names_of(self, loader: Iterable[Any]) -> Iterator[str]:
        """Yield the names under which a loader is saved."""
        for name, part in self._parts.items():
            if isinstance(part, ObjectPart) and part.value is loader:
                yield name

    def _restore(self, saved: dict[str, Any]) -> tuple[set[str], int]:
        """Load the state. Return the names of its parts, and how many ranks saved it."""
        self._saved_position = None
        copy, peers = self._found_copy, self._checkpointer.peers
        if copy is not None:
            loaded, world_size = self._restore_copy(copy), peers.size
        else:
            found = self._found
            assert found is not None, "the position is from there"
            try:
                loaded = StoredState(self._checkpointer, found).restore(self._parts)
            except OtherRunError:
                self._checkpointer.withdraw()
                raise
            world_size = found.world_size
            self.step = self.resumed_step = found.step
            self._checkpointer.resumed(found)
            if self._copies is not None:
                self._copies.resumed(None)  # not before: the script may not fit either
            hooks.checkpoint_saved(found.step)
            if peers.rank == 0:
                _log.info("Resumed at step %d from %s.", found.step, found.path)
        self._acted_step = self.step
        if world_size == peers.size:
            if _is_over(saved):
                self._position.end_again(saved)
            RandomStates().load_state_dict(saved["random"])
            self._warn_if_frozen_otherwise(saved.get("trained"))  # a release before had none
        return loaded, world_size

    def _fits(self, saved: dict[str, Any]) -> bool:
        """Return whether all that was saved has a place on all ranks.

        A script may still add some of it, or freeze some, at the begin of the epoch.
        """
        found = self._found
        if found is None:
            return False
        is_frozen_so = saved.get("trained") in (None, self._position.trained())
        stored = StoredState(self._checkpointer, found)
        return stored.fits(self._parts, is_ready=is_frozen_so)

    def _warn_if_frozen_otherwise(self, trained: int | None) -> None:
        own = self._position.trained()
        if trained not in (None, own):
            _log.warning(
                "%d parameters are not frozen (requires_grad), and %d were not at step %d: what "
                "the script freezes or unfreezes in an earlier epoch, it has to do at a resume, "
                "too, before paceline.steps.",
                own,
                trained,
                self.step,
            )

    def _warn_if_of_another_length(self, loader: Iterable[Any], had: int | None) -> None:
        has = batches_of(loader)
        if None not in (had, has) and had != has and self._checkpointer.peers.rank == 0:
            _log.warning(
                "The loader has %d batches, and had %d at step %d. The position in the data is a "
                "number of batches: if their size or the data set is another one, samples of this "
                "epoch are left out or taken twice.",
                has,
                had,
                self.step,
            )

    def _restore_copy(self, copy: CopyFile) -> set[str]:
        copies, peers, record = self._copies, self._checkpointer.peers, copy.record
        assert copies is not None, "the copy is from there"
        loaded = MemoryState(copy).restore(self._parts)
        self._found_copy = None  # its file can be freed
        self.step = self.resumed_step = record.step
        if copies.disk is not None:
            hooks.checkpoint_saved(copies.disk.step)
        if peers.rank == 0:
            _log.info("Resumed at step %d from %s.", record.step, self.resumed_from)
        peers.gather(None)  # all ranks have loaded theirs
        copies.resumed(Saved(record.generation, record.step))
        return loaded


def _modules_of(parts: Mapping[str, StatePart]) -> list[nn.Module]:
    return [
        module for part in parts.values() if isinstance(part, ModulePart) for module in part.modules
    ]


def _parameter_names(parts: Mapping[str, StatePart]) -> dict[int, str]:
    """Return the full names of all parameters by `id`."""
    modules = {name: part for name, part in parts.items() if isinstance(part, ModulePart)}
    single = len(modules) == 1
    return {
        identity: parameter if single else f"{name}.{parameter}"
        for name, part in modules.items()
        for identity, parameter in part.parameter_names()
    }


def _drop(
    copies: MemoryCopies | None,
    replicas: ReplicaCheck | None,
    position: DataPosition,
    driver: requests.RequestDriver,
    *,
    is_alone: bool,
) -> None:
    """End the threads of a `Checkpoints` that the script has dropped; in any thread."""
    if replicas is not None:
        replicas.end()
    if copies is not None:
        copies.drop(
            is_complete=position.epoch >= 0 and not (driver.stopped or position.is_left_by_exit),
            is_over=_is_over_at_exit(position, driver, is_alone=is_alone),
        )


def _is_over_at_exit(
    position: DataPosition, driver: requests.RequestDriver, *, is_alone: bool
) -> bool:
    """Return whether copies are of no use once the process ends, without an error.

    A process with a process group that it does not destroy may end before its training does, as on
    a signal; a process alone mostly ends with it, also after a `break`.
    """
    if driver.stopped or position.epoch < 0:
        return False
    if is_alone:
        return position.is_over or not position.is_left_by_exit
    return position.is_over and position.is_last and not position.is_left_by_exit


def _call(reference: WeakMethod[Callable[[], object]], *_: object) -> None:
    if (method := reference()) is not None:
        method()


def _is_over(saved: dict[str, Any]) -> bool:
    """Return whether a position was saved after the end of its epoch, outside the loop."""
    return bool(saved.get("is_over"))  # a release before had none


def _new_group() -> dist.ProcessGroup | None:
    """Return a gloo group of all ranks; None for a process alone.

    Raises ValueError if the process group of the other ranks does not exist yet.
    """
    if dist.is_available() and dist.is_initialized():
        group = dist.new_group(backend="gloo", timeout=_timeout(), group_desc="checkpoints")
        assert isinstance(group, dist.ProcessGroup), "all ranks are members"
        return group
    if launched_world_size() > 1:
        raise ValueError("create paceline.Checkpoints after torch.distributed.init_process_group")
    return None


def _timeout() -> timedelta:
    """Return how long a save waits for a rank: as long as the training, in which one may evaluate.

    After a timeout nothing more can be saved.
    """
    timeouts, world = [_TIMEOUT], dist.group.WORLD
    assert world is not None, "checked before"
    for device in world._device_types:
        with suppress(AttributeError, RuntimeError):  # backends of others need not have options
            timeouts.append(world._get_backend(device).options._timeout)
    return max(timeouts)


def _report_no_copies(reason: str, *, is_incident: bool) -> None:
    _log.warning("Copies in memory: %s.", reason)
    if is_incident:
        hooks.checkpoint_failed(f"copies in memory: {reason}")


if TYPE_CHECKING:
    from paceline.loop import Resumable

    def _state_of_steps(state: Checkpoints) -> Resumable:
        return state
