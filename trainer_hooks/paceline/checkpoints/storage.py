"""Atomic checkpoints: torch.distributed.checkpoint with hashes and a commit marker (`layout.py`).

Saving: the state is copied and training continues. A thread writes the shards, hashes them and
gathers the hashes; rank 0 compares them with the files on disk and commits. The thread uses its own
process group, because collectives of two threads on one group would interleave.

Ranks compare what they have under the same names (`contents.py`). What is the same is stored once,
under its name; what differs from that of the lowest rank is stored as `NAME@rankN`, where N is the
lowest rank that has it. So stages of a pipeline whose names collide, or buffers that differ between
replicas, do not overwrite each other. The manifest has the variant of each rank.

Loading tries the best committed checkpoint. Each rank hashes a share of the files, because a
flipped bit would otherwise load silently. If a hash differs, all ranks set the checkpoint aside and
try the previous one.

Only content that was read and is wrong counts as damage. If a rank cannot read a checkpoint
(missing mount, no permission, I/O error), the checkpoint may still be intact: that rank ends with
UnreadableError, so that the start fails on its node, and no file is changed.
"""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import socket
import threading
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from paceline.checkpoints.contents import content_of, owners_of
from paceline.checkpoints.errors import (
    CheckpointError,
    DamagedError,
    OtherRunError,
    UnreadableError,
)
from paceline.checkpoints.layout import (
    COMMITTED,
    DAMAGED,
    Entry,
    Saved,
    claim,
    commit,
    describe,
    discard,
    prune,
    read_manifest,
    refuse_if_all_damaged,
    refuse_if_lost,
    refuse_if_outdated,
    saved_checkpoints,
    set_aside,
    withdraw,
)
from paceline.checkpoints.metadata import SafeReader
from paceline.checkpoints.rank_group import RankGroup, reason_of
from paceline.saves import NO_SPACE, with_cause

_log = logging.getLogger(__name__)

# Ranks that could read wait this long for the exit of those that could not, because the first rank
# to exit determines the node at fault.
_YIELD_SECONDS = 5.0
_FULL = (NO_SPACE, os.strerror(errno.EDQUOT))

State = Mapping[str, Tensor]
Variants = dict[str, list[int | None]]  # by name: the rank that each rank's content is stored for


class _DirectoryView(NamedTuple):
    """The checkpoint directory as one rank sees it."""

    host: str
    has_claim: bool  # whether it contains the claim that rank 0 has just written
    names: frozenset[str]  # names of the committed checkpoints
    error: str | None  # why the directory cannot be listed


class _Checked(NamedTuple):
    """The result of one rank's share of the verification.

    All fields are None if there is no fault.
    """

    damage: str | None = None  # content that was read and is wrong
    missing: str | None = None  # name of a file that does not exist for this rank
    unreadable: str | None = None  # why this rank could not read


@dataclass(frozen=True, slots=True)
class Verified:
    """A committed checkpoint whose hashes are right."""

    path: Path
    step: int
    world_size: int
    variants: Variants
    metadata: Metadata

    def stored_name(self, name: str, rank: int) -> str | None:
        """Return the name under which this rank's content is stored; None: it has none.

        Raises CheckpointError if that is unknown: ranks differ, and there were as many then.
        """
        ranks = self.variants.get(name)
        if ranks is None:
            return name if name in self.metadata.state_dict_metadata else None
        owner = ranks[rank] if rank < len(ranks) else None
        return None if owner is None else _variant(name, owner, ranks)

    def all_variants(self, name: str) -> list[str]:
        """Return the names of all contents that are stored for `name`."""
        ranks = self.variants.get(name)
        if ranks is None:
            return [name] if name in self.metadata.state_dict_metadata else []
        owners = sorted({owner for owner in ranks if owner is not None})
        return [_variant(name, owner, ranks) for owner in owners]

    def names(self) -> set[str]:
        """Return the names of all contents, once each if ranks differ."""
        variants = {each for name in self.variants for each in self.all_variants(name)}
        return set(self.metadata.state_dict_metadata) - variants | set(self.variants)


class _Writer(FileSystemWriter):
    """torch's writer, whose errors are those of the file system.

    Torch's zip writer raises one about a wrong position in the file instead.
    """

    def write_data(self, *args: Any, **options: Any) -> Any:
        try:
            return super().write_data(*args, **options)
        except RuntimeError as error:
            if isinstance(error.__context__, OSError):
                raise error.__context__ from None
            raise


class Checkpointer:
    """Saves and loads one rank's share. All ranks must make the same calls in the same order."""

    def __init__(
        self,
        directory: Path,
        group: dist.ProcessGroup | None,
        generation: int,
        *,
        run: Mapping[str, Any],
        keep: int,
        saved_step: int | None = None,
        on_result: Callable[[int, str | None], None] = lambda step, failure: None,
    ) -> None:
        """Claim the directory.

        Args:
            directory: shared by all ranks.
            group: a gloo group of all ranks, used only by this object; None: there is one rank.
            generation: the job's generation.
            run: settings that a checkpoint must have in common with the run that loads it.
            keep: number of checkpoints to keep.
            saved_step: newest step that the job is known to have saved; None: unknown.
            on_result: called with the step, and None or the reason of the failure, when a save
                ends; called in a separate thread.

        Raises:
            CheckpointError: a newer generation has claimed `directory` (on every rank).
            UnreadableError: this rank's node sees another content of `directory` than the others.
        """
        self.directory = directory
        self.generation = generation
        self.run = dict(run)
        self.keep = max(1, keep)
        self.peers = RankGroup(group)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint-commit")
        self._latest: tuple[int, Future[str | None]] | None = None
        self._on_result = on_result
        self._stager: DefaultStager | None = None
        self._intact: Saved | None = None  # the newest that this rank has committed
        self._was_full = False
        self._broken: str | None = None  # why the group can no longer be used
        failure = self.peers.on_rank_0(lambda: claim(directory, generation))
        if failure:
            raise CheckpointError(failure)
        self._compare_views(saved_step)

    def save(self, step: int, state: State, failure: str | None = None) -> None:
        """Copy the state and start to write it; wait for an earlier save in progress first.

        `failure`: why this rank has no state to save; then no rank commits.
        """
        if self._latest is not None and self._latest[0] == step and self.wait():
            return
        self.wait()
        if self._broken is not None:
            self._latest = step, _done(self._broken)
            return
        path = self.directory / Saved(self.generation, step).name
        try:
            staged = self._stage(state)
        except Exception as error:  # no memory: training continues
            staged, failure = {}, f"{reason_of(error)} (rank {self.peers.rank})"
        self._latest = step, self._thread.submit(self._commit, step, path, staged, failure)

    def wait(self) -> bool:
        """Wait for the save in progress, if any. Return whether it was committed."""
        return self._latest is None or self._latest[1].result() is None

    def abandon(self) -> None:
        """Begin no further save. One in progress is not committed: other ranks are gone."""
        self._broken = "the generation ended"
        self._thread.shutdown(wait=False, cancel_futures=True)

    def withdraw(self) -> None:
        """Save nothing, and leave the directory to the job that saved there and may still train."""
        self.abandon()
        if self.peers.rank == 0:
            self.peers.attempt(partial(withdraw, self.directory, self.generation))

    def close(self) -> None:
        self.wait()
        self._thread.shutdown()

    def find(self) -> Verified | None:
        """Return the best undamaged checkpoint, the same on all ranks; None if none was ever saved.

        Raises:
            CheckpointError: all are damaged.
            OtherRunError: it is of a run with other settings.
            UnreadableError: a rank could not read it.
        """
        for saved in self.peers.from_first(self._candidates()):
            path = self.directory / saved.name
            damage = self._verify(path)
            if damage is None:
                return self._open(path)
            failure = self.peers.on_rank_0(partial(self._set_aside, saved, damage))
            if failure:
                raise CheckpointError(failure)
        failure = self.peers.on_rank_0(partial(refuse_if_all_damaged, self.directory))
        if failure:
            raise CheckpointError(failure)
        return None

    def read(self, found: Verified, state: Mapping[str, Tensor]) -> None:
        """Fill tensors by the names under which they are stored.

        Raises UnreadableError if that fails; some tensors may be filled then.
        """
        self._allow_alone()
        try:
            load(
                dict(state),
                storage_reader=SafeReader(found.path),
                process_group=self.peers.group,
                no_dist=self.peers.group is None,
            )
        except (OSError, CheckpointException) as error:
            raise UnreadableError(
                f"the hashes of {found.path} are right, but it cannot be read: {reason_of(error)}"
            ) from error

    def resumed(self, found: Verified) -> None:
        """Note that the state of this checkpoint was loaded: it need not be saved again."""
        self._latest = (found.step, _done())

    def load(self, state: dict[str, Tensor]) -> int | None:
        """Fill `state` from the best undamaged checkpoint. Return its step; None without one.

        Raises CheckpointError as `find` does.
        """
        found = self.find()
        if found is None:
            return None
        # Read into copies first, so that `state` is unchanged if reading fails halfway.
        copies = {name: torch.empty_like(tensor, device="cpu") for name, tensor in state.items()}
        self.read(found, copies)
        for name, tensor in state.items():
            tensor.copy_(copies[name])
        self.resumed(found)
        return found.step

    # Saving: the work of each rank's checkpoint thread.

    def _stage(self, state: State) -> dict[str, Tensor]:
        """Copy the state to the host's memory."""
        if self._stager is None:
            on_device = torch.accelerator.is_available()
            options = StagingOptions(
                use_pinned_memory=on_device,
                use_shared_memory=False,
                use_async_staging=False,
                use_non_blocking_copy=on_device,
            )
            self._stager = DefaultStager(options)
        staged = self._stager.stage(dict(state))
        assert isinstance(staged, dict), "staging without a thread returns the copy"
        return staged

    def _commit(
        self, step: int, path: Path, state: dict[str, Tensor], failure: str | None
    ) -> str | None:
        """Commit the checkpoint of `step`. Return the error, if any, the same on all ranks."""
        try:
            failure = self.peers.first(failure or self._outdated()) or self._write(
                step, path, state
            )
        except Exception as error:  # training continues, whatever ends a save
            failure = self._broken = f"{reason_of(error)} (rank {self.peers.rank})"
            is_lost_peer = isinstance(error, RuntimeError)  # torch's, of a rank that has died
            _log.error(
                "The checkpoint of step %d was not committed: %s.",
                step,
                failure,
                exc_info=not is_lost_peer,
            )
        else:
            if failure and self.peers.rank == 0:
                _log.error("The checkpoint of step %d was not committed: %s.", step, failure)
        self._on_result(step, failure)
        return failure

    def _outdated(self) -> str | None:
        """Return the reason if a newer generation has the directory, before anything is written."""
        if self.peers.rank:
            return None
        return self.peers.attempt(partial(refuse_if_outdated, self.directory, self.generation))

    def _write(self, step: int, path: Path, state: dict[str, Tensor]) -> str | None:
        peers = self.peers
        variants = self._find_variants(state)
        named = {_name_of(name, peers.rank, variants): value for name, value in state.items()}
        failure = self._write_once(step, path, named, variants)
        if failure is not None and any(each in failure for each in _FULL):
            refusal = peers.on_rank_0(lambda: self._make_room(path))
            if refusal is None:
                return self._write_once(step, path, named, variants)
            failure += f"; {refusal}"
        return failure

    def _write_once(
        self, step: int, path: Path, named: dict[str, Tensor], variants: Variants
    ) -> str | None:
        peers, files = self.peers, dict[str, Entry]()

        def write() -> None:
            self._allow_alone()
            writer = _Writer(path)
            try:
                save(
                    named,
                    storage_writer=writer,
                    process_group=peers.group,
                    no_dist=peers.group is None,
                )
            except CheckpointException as error:
                raise CheckpointError(with_cause(reason_of(error), str(path))) from error
            files.update((file.name, describe(file)) for file in self._own_files(path))

        failure = peers.first(peers.attempt(write))
        if failure is None:
            whole = {name: entry for part in peers.gather(files) for name, entry in part.items()}
            failure = peers.on_rank_0(lambda: self._mark(step, path, whole, variants))
        if failure is not None and peers.rank == 0:
            peers.attempt(lambda: discard(path))
        return failure

    def _make_room(self, path: Path) -> None:
        """Delete the oldest checkpoint, which the new one at `path` would have replaced.

        Never the last one, and only if the newest is intact. Raises CheckpointError if it has to
        stay.
        """
        kept = saved_checkpoints(self.directory)
        if len(kept) < max(2, self.keep) or (path / COMMITTED).exists():
            raise CheckpointError(
                f"no older checkpoint can be deleted for it: {len(kept)} of the {self.keep} that "
                "are to be kept exist; free space, or keep fewer"
            )
        if kept[0] != self._intact:
            newest = self.directory / kept[0].name
            for name, entry in read_manifest(newest)["files"].items():
                if describe(newest / name) != entry:
                    raise CheckpointError(f"the newest checkpoint, {newest}, is damaged")
        prune(self.directory, self.keep - 1, self.generation)
        if not self._was_full:
            self._was_full = True
            _log.warning(
                "The disk has no space for %d checkpoints and a new one: from now on the oldest "
                "one, as of step %d, is deleted before a new one is written. Free space, or keep "
                "fewer.",
                self.keep,
                kept[-1].step,
            )

    def _allow_alone(self) -> None:
        """Leave out torch's warning that there is no process group: it is as it should be."""
        if self.peers.group is None:
            message = "torch.distributed is disabled, unavailable or uninitialized"
            warnings.filterwarnings("ignore", message=message, category=UserWarning)

    def _find_variants(self, state: State) -> Variants:
        """Compare what ranks have under the same names. Return the names with several contents."""
        if self.peers.size == 1:
            return {}
        own = {name: content_of(tensor) for name, tensor in sorted(state.items())}
        # Usually all ranks have the same content in all parts but a few small ones.
        parts: dict[str, Any] = {}
        for name, content in own.items():
            part = parts.setdefault(_part(name), hashlib.sha256())
            part.update(repr((name, content.mesh, content.mesh or content.digest)).encode())
        summaries = self.peers.gather({part: value.digest() for part, value in parts.items()})
        unequal = {
            part
            for summary in summaries
            for part in summary
            if any(other.get(part) != summary[part] for other in summaries)
        }
        if not unequal:
            return {}
        every = self.peers.gather(
            {name: content for name, content in own.items() if _part(name) in unequal}
        )
        variants: Variants = {}
        for name in sorted({name for each in every for name in each}):
            owners = owners_of([each.get(name) for each in every])
            if len(set(owners) - {None}) > 1:
                variants[name] = owners
        return variants

    def _own_files(self, path: Path) -> list[Path]:
        own = list(path.glob(f"__{self.peers.rank}_*.distcp"))
        return [*own, path / ".metadata"] if self.peers.rank == 0 else own

    def _mark(self, step: int, path: Path, files: dict[str, Entry], variants: Variants) -> None:
        """Compare the files on disk with what the ranks wrote, and commit."""
        for name, entry in files.items():
            if (path / name).stat().st_size != entry["bytes"]:
                raise CheckpointError(
                    f"{name} on rank 0's disk differs in size from what its rank wrote"
                )
        manifest = {
            "step": step,
            "generation": self.generation,
            "run": self.run,
            "world_size": self.peers.size,
            "variants": variants,
            "files": files,
        }
        commit(path, manifest, self.generation)
        self._intact = Saved(self.generation, step)
        prune(self.directory, self.keep, self.generation)

    # Loading

    def _candidates(self) -> list[Saved] | None:
        return saved_checkpoints(self.directory) if self.peers.rank == 0 else None

    def _compare_views(self, saved_step: int | None) -> None:
        """Raise UnreadableError on ranks whose node does not see the shared directory."""
        views = self.peers.gather(self._directory_view())
        names = frozenset().union(*(view.names for view in views))
        unable = [
            view.error is not None or view.names != names or not (view.has_claim or names)
            for view in views
        ]
        own = views[self.peers.rank]
        if any(unable):
            reason = own.error or (
                f"{own.host} does not see what other nodes see in {self.directory}: "
                "is the shared directory mounted there?"
            )
            self._fail_unreadable(reason if unable[self.peers.rank] else None, views, unable)
        if not all(view.has_claim for view in views):
            # Rank 0 wrote its claim to another directory, although all nodes see the same
            # checkpoints.
            self._fail_unreadable(
                f"{self.directory} of rank 0 is another directory than that of its peers"
                if self.peers.rank == 0
                else None,
                views,
                [rank == 0 for rank in range(self.peers.size)],
            )
        if saved_step and not names and not any(self.directory.glob(f"{DAMAGED}*")):
            raise UnreadableError(
                f"the job saved step {saved_step}, but {self.directory} on {own.host} contains no "
                "checkpoint: is the shared directory mounted there? Training does not restart "
                "from step 0. To train from step 0, submit a new job."
            )

    def _directory_view(self) -> _DirectoryView:
        host, claim_name = socket.gethostname(), f"generation-{self.generation:08}"
        try:
            names = frozenset(saved.name for saved in saved_checkpoints(self.directory))
            return _DirectoryView(host, (self.directory / claim_name).exists(), names, None)
        except OSError as error:
            return _DirectoryView(host, False, frozenset(), f"{self.directory} on {host}: {error}")

    def _verify(self, path: Path) -> str | None:
        """Check the hashes of all files, a share per rank.

        Return the damage, the same on all ranks.

        Raises:
            OtherRunError: the checkpoint is of another run.
            UnreadableError: a rank could not read its share.
        """
        peers = self.peers
        checked = peers.gather(self._check_share(path))
        found = next((result.damage for result in checked if result.damage), None)
        if found:
            return found
        # A file is lost if it does not exist for rank 0 either, which lists the directory.
        missing = {result.missing for result in checked if result.missing}
        lost = peers.on_rank_0(partial(refuse_if_lost, path, sorted(missing)))
        if lost:
            return lost
        reasons = [
            result.unreadable or (result.missing and f"{path / result.missing} does not exist")
            for result in checked
        ]
        if any(reasons):
            self._fail_unreadable(reasons[peers.rank], None, [bool(reason) for reason in reasons])
        return None

    def _check_share(self, path: Path) -> _Checked:
        try:
            manifest = read_manifest(path)
            if manifest["run"] != self.run:
                raise OtherRunError(
                    f"the checkpoints in {self.directory} are of the run {manifest['run']}, but "
                    f"this is {self.run}; use another directory or the same settings"
                )
            files: dict[str, Entry] = manifest["files"]
            for name in sorted(files)[self.peers.rank :: self.peers.size]:
                if describe(path / name) != files[name]:
                    raise DamagedError(f"{name} does not match its SHA-256")
        except DamagedError as error:
            return _Checked(damage=f"{error} (rank {self.peers.rank})")
        except FileNotFoundError as error:
            return _Checked(missing=Path(error.filename).name)
        except (OSError, UnreadableError) as error:
            return _Checked(unreadable=reason_of(error))
        return _Checked()

    def _open(self, path: Path) -> Verified:
        try:
            manifest = read_manifest(path)
            metadata = SafeReader(path).read_metadata()
        except OSError as error:
            raise UnreadableError(f"{path} cannot be read: {reason_of(error)}") from error
        return Verified(
            path=path,
            step=manifest["step"],
            world_size=manifest.get("world_size", self.peers.size),
            variants=manifest.get("variants", {}),
            metadata=metadata,
        )

    def _fail_unreadable(
        self, reason: str | None, views: list[_DirectoryView] | None, unable: list[bool]
    ) -> NoReturn:
        """End the ranks that could not read; the others wait for them and then end too."""
        if reason is not None:
            raise UnreadableError(reason)
        ranks = [rank for rank, is_unable in enumerate(unable) if is_unable]
        hosts = "" if views is None else f" ({', '.join({views[rank].host for rank in ranks})})"
        threading.Event().wait(_YIELD_SECONDS)
        raise UnreadableError(f"ranks {ranks}{hosts} cannot read {self.directory}")

    def _set_aside(self, saved: Saved, damage: str) -> None:
        _log.error("Skipped the checkpoint of step %d, which is damaged: %s.", saved.step, damage)
        set_aside(self.directory, saved)


def _part(name: str) -> str:
    return name.partition("/")[0].partition(".")[0]


def _variant(name: str, owner: int, ranks: list[int | None]) -> str:
    """Return the stored name of the content that rank `owner` has; the first one has no suffix."""
    first = min(other for other in ranks if other is not None)
    return name if owner == first else f"{name}@rank{owner}"


def _name_of(name: str, rank: int, variants: Variants) -> str:
    ranks = variants.get(name)
    if ranks is None:
        return name
    owner = ranks[rank]
    assert owner is not None, "this rank has the name"
    return _variant(name, owner, ranks)


def _done(failure: str | None = None) -> Future[str | None]:
    done: Future[str | None] = Future()
    done.set_result(failure)
    return done
