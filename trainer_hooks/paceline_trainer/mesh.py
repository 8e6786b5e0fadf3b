"""The process groups of a rank: the world, and one group per parallel axis.

Pipeline transfers use two groups, one towards later stages and one towards earlier ones. Between
two ranks, each group then carries traffic in one direction only, in the order of sending. So sends
in opposite directions cannot block each other, neither over gloo nor over NCCL's ordered channels.
"""

from __future__ import annotations

import datetime
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # documented, not listed
from torch.distributed.distributed_c10d import PrefixStore, Store

import paceline
from paceline.rendezvous import wait_for_store
from paceline_trainer.settings import RankPlacement, TrainerSettings


@dataclass(frozen=True, slots=True)
class Mesh:
    """The process groups of this rank. An axis of size 1 has no group."""

    place: RankPlacement
    device: torch.device
    data: dist.ProcessGroup | None
    tensor: dist.ProcessGroup | None
    downstream: dist.ProcessGroup | None
    upstream: dist.ProcessGroup | None
    checkpoint: dist.ProcessGroup  # always gloo; used by the checkpoint thread

    def stage_peer(self, pp_rank: int) -> int:
        """Return the global rank with the same dp and tp rank in another stage."""
        own = self.place.coordinates
        return self.place.topology.rank(own.dp_rank, pp_rank, own.tp_rank)

    def link(self, source: int, destination: int) -> dist.ProcessGroup | None:
        """Return the group for transfers from stage `source` to stage `destination`."""
        return self.downstream if source < destination else self.upstream


def connect(settings: TrainerSettings, place: RankPlacement, store: Store | None = None) -> Mesh:
    """Join the process groups of this generation. Return when all ranks have joined."""
    device = torch.device(settings.device)
    if device.type == "cuda":
        device = torch.device("cuda", place.local_rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    timeout = datetime.timedelta(seconds=settings.timeout_seconds)
    world_size = place.topology.world_size
    if store is None:
        address, port = place.master_address, place.master_port
        if place.rank != 0:
            wait_for_store(address, port)
        store = TCPStore(address, port, world_size, place.rank == 0, timeout)
    # Ranks of an older generation that are still alive must not join this one.
    store = PrefixStore(f"generation-{place.generation}", store)
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        store=store,
        rank=place.rank,
        world_size=world_size,
        timeout=timeout,
    )
    return _groups(place, device)


def disconnect() -> None:
    dist.destroy_process_group()


def _groups(place: RankPlacement, device: torch.device) -> Mesh:
    own, topology = place.coordinates, place.topology
    data = [topology.rank(dp, own.pp_rank, own.tp_rank) for dp in range(topology.dp)]
    stages = [topology.rank(own.dp_rank, pp, own.tp_rank) for pp in range(topology.pp)]
    tensor = [topology.rank(own.dp_rank, own.pp_rank, tp) for tp in range(topology.tp)]
    checkpoint = _new_group(list(range(topology.world_size)), "checkpoint", None, "gloo")
    paceline.name_group(dist.group.WORLD, "world", axis="world")
    return Mesh(
        place=place,
        device=device,
        data=_axis_group(data, "data", "dp"),
        tensor=_axis_group(tensor, "tensor", "tp"),
        downstream=_axis_group(stages, "pipeline downstream", "pp"),
        upstream=_axis_group(stages, "pipeline upstream", "pp"),
        checkpoint=checkpoint,
    )


def _axis_group(ranks: list[int], name: str, axis: str) -> dist.ProcessGroup | None:
    return _new_group(ranks, name, axis, None) if len(ranks) > 1 else None


def _new_group(
    ranks: list[int], name: str, axis: str | None, backend: str | None
) -> dist.ProcessGroup:
    # Only the members take part, all in the same order, so no collective of the world is needed per
    # group.
    group = dist.new_group(ranks, backend=backend, use_local_synchronization=True, group_desc=name)
    assert isinstance(group, dist.ProcessGroup), "this rank is a member of its own groups"
    paceline.name_group(group, name, axis=axis)
    return group
