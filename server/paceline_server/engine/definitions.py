"""Definitions that ranks report once: process groups, names of sections, facts about the job.

The batches with them are pruned long before a job ends. A worker that takes the job over, and an
analysis of its last steps, need them all the same.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from paceline_server.engine.types import Placement
from paceline_server.steps.groups import MAXIMUM_GROUPS_PER_RANK
from paceline_wire.batch import RankDefined
from paceline_wire.ring import GroupDefinition, RankDescription, SectionDefinition

_GROUPS = 1 << 16  # in a job
_DESCRIPTIONS = 16  # per rank; later ones take precedence


class Definitions(msgspec.Struct):
    """Definitions of one generation. A group is stored once, though all its members report it."""

    generation: int
    started_ns: int  # as in `Placement`: another run may have the same generation
    groups: list[GroupDefinition] = []  # with id 0
    places: dict[int, dict[int, int]] = {}  # by rank, then by its id of a group: index of `groups`
    sections: dict[int, dict[int, str]] = {}  # by rank, then by id
    descriptions: dict[int, list[RankDescription]] = {}  # by rank
    metadata: dict[str, str] = {}  # from the identities of ranks; the first value counts

    def are_of(self, placement: Placement) -> bool:
        """Return whether the ranks of this placement reported them."""
        return (self.generation, self.started_ns) == (placement.generation, placement.started_ns)

    def events(self, job: str, placement: Placement) -> Iterator[RankDefined]:
        """Yield them as the ranks of a job reported them."""
        for rank in sorted({*self.places, *self.sections, *self.descriptions}):
            groups = self.places.get(rank, {}).items()
            sections = self.sections.get(rank, {}).items()
            yield RankDefined(
                time_ns=0,
                job=job,
                generation=placement.reported_generation(rank),
                rank=rank,
                definitions=[
                    *(msgspec.structs.replace(self.groups[at], id=number) for number, at in groups),
                    *(SectionDefinition(number, name) for number, name in sections),
                ],
                descriptions=self.descriptions.get(rank, []),
            )


class DefinitionLog:
    """Collects the definitions of a generation."""

    def __init__(self, placement: Placement) -> None:
        self.definitions = Definitions(placement.generation, placement.started_ns)
        self._indices: dict[tuple[str, str | None, tuple[int, ...]], int] = {}

    def describe(self, metadata: dict[str, str]) -> None:
        """Add the metadata of a rank's identity."""
        self.definitions.metadata = {**metadata, **self.definitions.metadata}

    def add(self, event: RankDefined) -> None:
        known = self.definitions
        for definition in event.definitions:
            if isinstance(definition, GroupDefinition):
                self._add_group(event.rank, definition)
            else:
                known.sections.setdefault(event.rank, {})[definition.id] = definition.name
        if event.descriptions:
            found = [*known.descriptions.get(event.rank, []), *event.descriptions]
            known.descriptions[event.rank] = found[-_DESCRIPTIONS:]

    def _add_group(self, rank: int, definition: GroupDefinition) -> None:
        places = self.definitions.places.setdefault(rank, {})
        groups = self.definitions.groups
        if len(places) >= MAXIMUM_GROUPS_PER_RANK or len(groups) >= _GROUPS:
            return
        key = definition.name, definition.axis, tuple(definition.ranks)
        index = self._indices.setdefault(key, len(groups))
        if index == len(groups):
            groups.append(msgspec.structs.replace(definition, id=0))
        places[definition.id] = index
