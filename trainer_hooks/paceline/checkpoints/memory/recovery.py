"""Which copies a restart loads: the same step on all ranks, or none.

All ranks list what their nodes have, exchange the lists, and come to the same choice from them: the
newest step of which each rank has a copy, its own or one on another node. Each rank then verifies
its copy. If one is damaged, all choose again without it, at most `ATTEMPTS` times; after that the
checkpoint on disk is used. No rank loads anything before all have verified.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import NamedTuple

from paceline.checkpoints.errors import CheckpointError, DamagedError
from paceline.checkpoints.layout import Saved
from paceline.checkpoints.memory.directory import CopyDirectory, CopyName
from paceline.checkpoints.memory.file import CopyFile, CopyRecord, read_record
from paceline.checkpoints.rank_group import RankGroup, first_of, reason_of

_log = logging.getLogger(__name__)

ATTEMPTS = 2  # with copies in memory; the third one is the disk


class Offer(NamedTuple):
    """A copy on a node, as far as its record shows."""

    name: CopyName
    run: str
    world_size: int
    disk: Saved | None  # the newest checkpoint on disk when it was made


class Source(NamedTuple):
    """A copy to load, and the first rank of the node that has it."""

    name: CopyName
    at: int


class Choice(NamedTuple):
    """A step, and where each rank gets its copy of it."""

    saved: Saved
    sources: tuple[Source, ...]  # by rank


def choose(
    offers: Sequence[Sequence[Offer]],
    first_ranks: Sequence[int],
    run: str,
    disk: Sequence[Saved],
    excluded: frozenset[Source],
) -> Choice | None:
    """Return the newest step that all ranks have in memory; None if the disk has the best one.

    Args:
        offers: for each rank, the copies on its node, or none if an earlier rank has listed them.
        first_ranks: for each rank, the first one of its node.
        run: identity of the checkpoint directory.
        disk: committed checkpoints, the best one first.
        excluded: copies that are damaged or cannot be read.
    """
    size = len(offers)
    newest_on_disk = disk[0] if disk else None
    found: dict[Saved, dict[int, Source]] = {}
    known = {offer.disk for own in offers for offer in own if offer.run == run and offer.disk}
    if known and (newest_on_disk is None or newest_on_disk < max(known)):
        return None  # checkpoints were deleted: the user went back to an earlier one
    for rank, own in enumerate(offers):
        at = first_ranks[rank]
        for offer in own:
            source = Source(offer.name, at)
            if offer.run != run or offer.world_size != size or source in excluded:
                continue
            ranks = found.setdefault(Saved(offer.name.generation, offer.name.step), {})
            is_own = offer.name.rank < size and at == first_ranks[offer.name.rank]
            if is_own or offer.name.rank not in ranks:
                ranks[offer.name.rank] = source
    for saved in sorted(found, reverse=True):
        if newest_on_disk is not None and saved < newest_on_disk:
            return None
        if found[saved].keys() >= set(range(size)):
            return Choice(saved, tuple(found[saved][rank] for rank in range(size)))
    return None


def offers_of(directory: CopyDirectory) -> list[Offer]:
    """Return the copies on this node. A file whose record is damaged is left out."""
    found = []
    for name in directory.copies():
        try:
            record = read_record(directory.file(name))
        except (OSError, DamagedError):
            continue
        if CopyName(record.generation, record.step, record.rank) == name:
            disk = None if record.disk is None else Saved(*record.disk)
            found.append(Offer(name, record.run, record.world_size, disk))
    return found


class Recovery:
    """The search for copies to load. All ranks make the same calls."""

    def __init__(
        self,
        directory: CopyDirectory,
        peers: RankGroup,
        first_ranks: Sequence[int],
        run: str,
        fetch: Callable[[Source], None],
        check: Callable[[CopyFile], str | None],
    ) -> None:
        """Search nothing yet.

        Args:
            directory: of this node.
            peers: all ranks.
            first_ranks: for each rank, the first one of its node.
            run: identity of the checkpoint directory.
            fetch: copies a file of another node to this one; raises OSError or CheckpointError.
            check: returns why this rank cannot load a copy whose content is intact.
        """
        self._directory = directory
        self._peers = peers
        self._first_ranks = first_ranks
        self._run = run
        self._fetch = fetch
        self._check = check

    def find(self, disk: Sequence[Saved]) -> tuple[Choice, CopyFile] | None:
        """Return the step to load and this rank's copy of it, verified on all ranks, or None."""
        is_first = self._first_ranks[self._peers.rank] == self._peers.rank
        offers = self._peers.gather(offers_of(self._directory) if is_first else [])
        excluded: frozenset[Source] = frozenset()
        for _ in range(ATTEMPTS):
            choice = choose(offers, self._first_ranks, self._run, disk, excluded)
            if choice is None:
                return None
            copy, failure = self._open(choice.sources[self._peers.rank])
            unfit = None if copy is None else self._unfit(copy)
            failures, misfits = zip(*self._peers.gather((failure, unfit)), strict=True)
            if not any(failures):
                # The copies are intact, but perhaps this script cannot load them.
                unfit = first_of(misfits)
                if unfit is None and copy is not None:
                    return choice, copy
                if self._peers.rank == 0:
                    _log.warning(
                        "The copies of step %d in memory are not used: %s.",
                        choice.saved.step,
                        unfit,
                    )
                return None
            bad = {
                source
                for source, reason in zip(choice.sources, failures, strict=True)
                if reason is not None
            }
            excluded |= bad
            if self._peers.rank == 0:
                _log.error(
                    "A copy of step %d in memory is not used: %s.",
                    choice.saved.step,
                    first_of(failures),
                )
        return None

    def _open(self, source: Source) -> tuple[CopyFile | None, str | None]:
        """Get and verify this rank's copy. Return it, or why it cannot be used."""
        rank, path = self._peers.rank, self._directory.file(source.name)
        try:
            if not path.exists():
                self._fetch(source)
            copy = CopyFile.verify(path)
            _refuse_if_mixed(copy.record, source.name, self._run, self._peers.size)
        except (OSError, CheckpointError) as error:
            if isinstance(error, DamagedError):
                path.unlink(missing_ok=True)
            return None, f"{reason_of(error)} (rank {rank})"
        return copy, None

    def _unfit(self, copy: CopyFile) -> str | None:
        try:
            return self._check(copy)
        except Exception as error:  # raised by the script's own objects: the others wait for us
            return f"{reason_of(error)} (rank {self._peers.rank})"


def _refuse_if_mixed(record: CopyRecord, name: CopyName, run: str, world_size: int) -> None:
    """Raise DamagedError for a copy of another run, generation, step, rank or number of ranks."""
    is_it = CopyName(record.generation, record.step, record.rank) == name
    if not is_it or record.run != run or record.world_size != world_size:
        raise DamagedError(
            f"{name.file} is of step {record.step}, rank {record.rank} of {record.world_size}, "
            f"generation {record.generation}"
        )
