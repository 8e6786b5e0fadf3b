"""Recognize a rank's place on the parallel axes from what the script creates, without annotation.

Each process group that spans an axis is one fact: the axis, the group's ranks and where it was
found. Facts come from every `DeviceMesh`, the groups of DDP and FSDP, the stages of
`torch.distributed.pipelining`, and the parallel state of Megatron and DeepSpeed. Together they give
sizes and coordinates; the server finds the order of the axes from the coordinates of all ranks.
Nothing here communicates.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from paceline.environment import OTHER_DIMENSIONS, axis_of
from paceline.session import Session, log_once
from paceline.wrapping import after, instances, loaded
from paceline_wire.topology import Axis, Coordinates, Topology

_Ranks = tuple[int, ...]
MESH, USE, PIPELINE = "DeviceMesh", "DDP or FSDP", "torch.distributed.pipelining"
# Getters of the parallel state of Megatron by axis; each returns this rank's group.
_MEGATRON: tuple[tuple[Axis, str], ...] = (
    ("tp", "get_tensor_model_parallel_group"),
    ("pp", "get_pipeline_model_parallel_group"),
    ("cp", "get_context_parallel_group"),
    ("dp", "get_data_parallel_group"),
    ("ep", "get_expert_model_parallel_group"),
)
# Getters of the object that a script or DeepSpeed itself gives its engine; the first one counts.
# The model-parallel group of a pipeline's grid has the ranks of all stages, so it comes last.
_DEEPSPEED: tuple[tuple[Axis, tuple[str, ...]], ...] = (
    (
        "tp",
        (
            "get_slice_parallel_group",
            "get_tensor_model_parallel_group",
            "get_model_parallel_group",
        ),
    ),
    ("pp", ("get_pipe_parallel_group", "get_pipeline_model_parallel_group")),
    ("cp", ("get_sequence_parallel_group",)),
    ("dp", ("get_data_parallel_group",)),
)


class Fact(NamedTuple):
    """A group of ranks along one axis, this rank among them."""

    axis: Axis | None  # None: to be found from its use
    ranks: _Ranks
    source: str


class Place(NamedTuple):
    """The sizes of all axes and this rank's coordinates, and where they were found."""

    topology: Topology
    coordinates: Coordinates
    sources: tuple[str, ...]


class TopologyRecognizer:
    """Collects the facts of the current session's rank, and reports its place when it changes."""

    def __init__(self, find_session: Callable[[], Session | None]) -> None:
        self._find_session = find_session
        self.begin(0, 1)

    def begin(self, rank: int, world_size: int) -> None:
        """Begin with the rank of a new session."""
        self._rank, self._world_size = rank, world_size
        self._facts: dict[tuple[Axis | None, _Ranks], Fact] = {}
        self._all_are_known = False  # the first step has begun

    def recognize(self, *, all_are_known: bool = False) -> None:
        """Take in what exists, and from now on what is created.

        Args:
            all_are_known: the first step begins: what has an unknown name now has been used.
        """
        self._all_are_known |= all_are_known
        mesh = loaded("torch.distributed.device_mesh", "DeviceMesh")
        parallel = loaded("torch.nn.parallel.distributed", "DistributedDataParallel")
        sharded = loaded(
            "torch.distributed.fsdp.fully_sharded_data_parallel", "FullyShardedDataParallel"
        )
        parameters = loaded(
            "torch.distributed.fsdp._fully_shard._fsdp_param_group", "FSDPParamGroup"
        )
        kinds: dict[Any, Callable[[Any], None]] = {
            mesh: self.add_mesh,
            parallel: self.add_data_parallel,
            sharded: self.add_data_parallel,
            parameters: self.add_fully_shard,
        }
        kinds.pop(None, None)  # those that the script has not loaded
        for kind, add in kinds.items():
            after(kind, "__init__", self._adding(add))
        for found in instances(*kinds):  # one pass over all objects of the process
            for kind, add in kinds.items():
                if isinstance(found, kind):
                    self._try(add, found)
        self._try(self._add_megatron)
        self._try(self._add_deepspeed)
        self._try(self._report)

    def _adding(self, add: Callable[[Any], None]) -> Callable[..., None]:
        def added(_: None, created: Any, *__: Any) -> None:
            add(created)
            self._report()

        return added

    def _try(self, call: Callable[..., None], *args: Any) -> None:
        try:
            call(*args)
        except Exception as error:
            log_once(f"topology {call.__name__}", "paceline: topology: %s", error)

    # Facts

    def add_mesh(self, mesh: Any) -> None:
        """Add the dimensions of a mesh that has this rank; those with unknown names for later."""
        coordinate = mesh.get_coordinate()
        if coordinate is None:
            return
        names = mesh.mesh_dim_names or (None,) * len(coordinate)
        for dimension, name in enumerate(names):
            if name in OTHER_DIMENSIONS:
                continue
            index = tuple(
                slice(None) if other == dimension else position
                for other, position in enumerate(coordinate)
            )
            self._add(None if name is None else axis_of(name), mesh.mesh[index].tolist(), MESH)

    def add_data_parallel(self, module: Any) -> None:
        """Add the groups of a DDP or FSDP1 module."""
        for name in ("process_group", "_inter_node_pg"):
            self._add_group("dp", getattr(module, name, None), USE)

    def add_fully_shard(self, parameters: Any) -> None:
        """Add the groups of parameters that `fully_shard` manages."""
        for name in ("shard_process_group", "replicate_process_group"):
            self._add_group("dp", getattr(parameters.mesh_info, name, None), USE)

    def add_stage(self, stage: Any) -> None:
        """Add the group of a stage of `torch.distributed.pipelining`."""
        self._add_group("pp", stage.group or _c10d().group.WORLD, PIPELINE)
        self._report()

    def _add_megatron(self) -> None:
        state = sys.modules.get("megatron.core.parallel_state")
        if state is None or not state.model_parallel_is_initialized():
            return
        for axis, getter in _MEGATRON:
            self._add_from(axis, state, getter, "Megatron parallel state")

    def _add_deepspeed(self) -> None:
        groups = sys.modules.get("deepspeed.utils.groups")
        units = getattr(groups, "mpu", None)
        for axis, getters in _DEEPSPEED:
            getter = next((one for one in getters if hasattr(units, one)), None)
            if getter is not None:
                self._add_from(axis, units, getter, "DeepSpeed groups")
        experts = getattr(groups, "_EXPERT_PARALLEL_GROUP", None) or {}
        for group in list(experts.values())[:1]:
            self._add_group("ep", group, "DeepSpeed groups")

    def _add_from(self, axis: Axis, state: Any, getter: str, source: str) -> None:
        """Add the group that a getter returns; it raises if the job has no such group."""
        try:
            group = getattr(state, getter)()
        except Exception:
            return
        self._add_group(axis, group, source)

    def _add_group(self, axis: Axis, group: Any | None, source: str) -> None:
        c10d = _c10d()
        if group is None or group is c10d.GroupMember.NON_GROUP_MEMBER:
            return
        ranks = [int(rank) for rank in c10d.get_process_group_ranks(group)]
        self._add(axis, ranks, source)
        session = self._find_session()
        is_default = len(ranks) == self._world_size
        if session is not None and session.process_groups is not None and not is_default:
            channels = session.process_groups.channels
            if not channels.has_name(group):
                channels.name(group, axis, axis)

    def _add(self, axis: Axis | None, ranks: Sequence[int], source: str) -> None:
        if len(ranks) > 1 and self._rank in ranks:
            fact = Fact(axis, tuple(ranks), source)
            self._facts.setdefault((axis, fact.ranks), fact)

    # The place

    def _report(self) -> None:
        session = self._find_session()
        if session is None or session.has_place or not self._facts:
            return
        place = combine(self._rank, self._world_size, self._known())
        if place is None:
            if self._all_are_known:
                log_once("place", "paceline: the groups of this job form no topology that it knows")
            return
        found = " ".join(
            f"{axis}{place.topology.size(axis)}"
            for axis in ("dp", "pp", "tp", "cp", "ep")
            if place.topology.size(axis) > 1
        )
        source = ", ".join(place.sources)
        session.update(
            source=source,
            topology=place.topology,
            coordinates=place.coordinates,
            metadata={"topology": f"{found} (from {source})"},
        )

    def _known(self) -> list[Fact]:
        """Return the facts with an axis.

        A dimension of a mesh with an unknown name is data parallel if DDP or FSDP uses its group,
        and else tensor parallel: nothing but DTensors would use it.
        """
        facts = list(self._facts.values())
        axes: dict[_Ranks, Axis] = {fact.ranks: fact.axis for fact in facts if fact.axis}
        found = [fact for fact in facts if fact.axis is not None]
        if self._all_are_known:
            found += [
                fact._replace(axis="tp")
                for fact in facts
                if fact.axis is None and fact.ranks not in axes
            ]
        return found


def combine(rank: int, world_size: int, facts: Iterable[Fact]) -> Place | None:
    """Return the place of a rank from the groups it is in; None if they do not fit together."""
    facts = list(facts)
    stated = [fact for fact in facts if fact.source not in (MESH, USE, PIPELINE)]
    if any(fact.axis != "dp" for fact in stated):
        facts = stated  # a framework's own parallel state is complete
    without_use = [fact for fact in facts if fact.source != USE or fact.axis != "dp"]
    candidates = [
        _Combination(rank, world_size, chosen, largest=largest)
        for chosen in (facts, without_use)
        for largest in (False, True)
    ]
    for is_complete in (True, False):
        for candidate in candidates:
            place = candidate.place(is_complete)
            if place is not None:
                return place
    return None


class _AxisGroup(NamedTuple):
    """A group as the values of one coordinate: this rank's, and how many there are."""

    ranks: _Ranks
    position: int
    size: int


class _Combination:
    """One way to combine facts: with the smallest or the largest of the groups of each axis."""

    def __init__(self, rank: int, world_size: int, facts: list[Fact], *, largest: bool) -> None:
        self._rank, self._world_size = rank, world_size
        self._sources = tuple(dict.fromkeys(fact.source for fact in facts))
        self._groups: dict[Axis, list[_AxisGroup]] = {}
        for axis in ("pp", "tp", "cp", "ep", "dp"):
            all_ranks = [fact.ranks for fact in facts if fact.axis == axis]
            chosen = [
                ranks
                for ranks in all_ranks
                if not any(
                    set(other) > set(ranks) if largest else set(other) < set(ranks)
                    for other in all_ranks
                )
            ]
            if chosen and axis != "dp":
                chosen = chosen[-1:]
            groups = [_AxisGroup(ranks, ranks.index(rank), len(ranks)) for ranks in chosen]
            self._groups[axis] = groups
        for axis in ("cp", "ep"):
            self._divide_data_ranks(axis)  # type: ignore[arg-type]

    def _divide_data_ranks(self, axis: Axis) -> None:
        """Take an axis that lies inside data-parallel groups out of them."""
        for inner in self._groups[axis]:
            for at, outer in enumerate(self._groups["dp"]):
                if not set(inner.ranks) <= set(outer.ranks):
                    continue
                of_inner = {outer.ranks.index(rank) for rank in inner.ranks}
                first, count = min(of_inner), outer.size // inner.size
                if of_inner == set(range(first, first + inner.size)) and not first % inner.size:
                    position = outer.position // inner.size
                elif of_inner == set(range(first, outer.size, count)) and first < count:
                    position = outer.position % count
                else:
                    continue
                self._groups["dp"][at] = _AxisGroup(outer.ranks, position, count)

    def place(self, is_complete: bool) -> Place | None:
        """Return the place; unless `is_complete`, ranks that no group explains form one axis."""
        sizes: dict[Axis, int] = {}
        position: dict[Axis, int] = {}
        total = 1
        for axis, groups in self._groups.items():
            sizes[axis], position[axis] = 1, 0
            for group in groups:
                sizes[axis] *= group.size
                position[axis] = position[axis] * group.size + group.position
            total *= sizes[axis]
        if total == 1 or self._world_size % total or (is_complete != (total == self._world_size)):
            return None
        if total < self._world_size:
            rest: Axis = "dp" if sizes["dp"] == 1 else "tp"
            at = self._position_in_rest()
            if sizes[rest] > 1 or at is None:
                return None
            sizes[rest], position[rest] = self._world_size // total, at
        return Place(
            Topology(**{str(axis): size for axis, size in sizes.items()}),  # type: ignore[arg-type]
            Coordinates(**{f"{axis}_rank": at for axis, at in position.items()}),
            self._sources,
        )

    def _position_in_rest(self) -> int | None:
        """Return this rank's position among those that differ from it on no known axis.

        None if the groups are not evenly spaced: other ranks' coordinates are then unknown.
        """
        steps = []
        for groups in self._groups.values():
            for group in groups:
                step = group.ranks[1] - group.ranks[0]
                end = group.ranks[0] + step * len(group.ranks)
                is_even = step > 0 and group.ranks == tuple(range(group.ranks[0], end, step))
                if not is_even or self._rank // step % len(group.ranks) != group.ranks.index(
                    self._rank
                ):
                    return None
                steps.append((step, len(group.ranks)))
        origin = self._rank - sum(self._rank // step % size * step for step, size in steps)
        return sum(
            all(other // step % size == 0 for step, size in steps) for other in range(origin)
        )


def _c10d() -> Any:
    return sys.modules["torch.distributed.distributed_c10d"]
