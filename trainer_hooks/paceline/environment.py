"""What the hooks know of their surroundings: the environment, the device mesh, the process.

The only place of the hooks that reads `os.environ`. Nothing here imports torch; where torch is
already loaded, it is asked.
"""

from __future__ import annotations

import logging
import os
import re
import socket
import sys
import time
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline_wire.job_name import as_job_name
from paceline_wire.node_directory import rings_of_running_agents
from paceline_wire.ring import DEFAULT_CAPACITY, SUFFIX, Identity, RingError, RingReader
from paceline_wire.topology import Coordinates, Topology

_log = logging.getLogger(__name__)

# Names under which people write the three axes in `init_device_mesh`.
AXES = {
    "dp": "dp",
    "data": "dp",
    "dp_replicate": "dp",
    "dp_shard": "dp",
    "replicate": "dp",
    "shard": "dp",
    "fsdp": "dp",
    "ddp": "dp",
    "pp": "pp",
    "pipeline": "pp",
    "pipe": "pp",
    "tp": "tp",
    "tensor": "tp",
    "model": "tp",
}


# Where torchrun, srun (not sbatch, whose script is one process) and mpirun say who this process is.
_LAUNCHERS = (
    ("RANK", "WORLD_SIZE", "LOCAL_RANK"),
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
)

_METADATA_BYTES = 3000  # of the page with the identity, whose names are short
_HOST_LENGTH = 40  # leaves room for what is told beside it
_UUID = re.compile("[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_UUID_LENGTH = 13  # 48 bits
_SCRIPT_LENGTH = 64


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What `PACELINE_*` and the launcher's variables say of this rank."""

    ring_directory: Path
    job: str
    generation: int
    rank: int
    local_rank: int
    world_size: int
    topology: Topology
    capacity: int
    gpu_uuid: str | None

    @property
    def ring_path(self) -> Path:
        return self.ring_directory / f"{self.job}.g{self.generation}.r{self.rank}{SUFFIX}"


def read_surroundings(environment: Mapping[str, str]) -> Surroundings | None:
    """None where no agent is. Raises ValueError for a variable that is no number, and for several.

    Agents are looked for where `PACELINE_RING_DIRECTORY` is not set; empty, it keeps all away.
    """
    directory = _ring_directory(environment)
    if directory is None:
        return None
    rank, world_size, local_rank = _place_in_job(environment)
    sizes = [_integer(environment, f"PACELINE_{axis}", 1) for axis in ("DP", "PP", "TP")]
    topology = Topology(*sizes)
    if topology.world_size != world_size:
        topology = Topology(dp=world_size)
    return Surroundings(
        ring_directory=directory,
        job=as_job_name(environment.get("PACELINE_JOB") or _job_name(environment, world_size)),
        generation=_generation(environment),
        rank=rank,
        local_rank=local_rank,
        world_size=world_size,
        topology=topology,
        capacity=_integer(environment, "PACELINE_RING_CAPACITY", DEFAULT_CAPACITY),
        gpu_uuid=environment.get("PACELINE_GPU_UUID") or _current_gpu_uuid(),
    )


def identify(
    surroundings: Surroundings,
    topology: Topology,
    coordinates: Coordinates,
    metadata: Mapping[str, str],
) -> Identity:
    known = {"python": sys.version.split()[0], **_script()}
    torch = sys.modules.get("torch")
    if torch is not None:
        known["torch"] = str(torch.__version__)
    monotonic_ns = time.perf_counter_ns()
    return Identity(
        job=surroundings.job,
        generation=surroundings.generation,
        rank=surroundings.rank,
        local_rank=surroundings.local_rank,
        world_size=surroundings.world_size,
        topology=topology,
        coordinates=coordinates,
        pid=os.getpid(),
        host=socket.gethostname(),
        clock_offset_ns=clock_offset_ns(),
        started_ns=monotonic_ns,
        gpu_uuid=surroundings.gpu_uuid,
        metadata=known | _that_fit(metadata),
    )


def _script() -> dict[str, str]:
    """What people call the training; of `-c` and of a shell there is no name."""
    program = Path((sys.argv or [""])[0])
    name = program.parent.name if program.name == "__main__.py" else program.name
    name = name.encode(errors="replace").decode()  # not every file's name is UTF-8
    return {"script": name[:_SCRIPT_LENGTH]} if name and not name.startswith("-") else {}


def _that_fit(metadata: Mapping[str, str]) -> dict[str, str]:
    """The first of them: the identity is a page. A whole configuration is given here too."""
    found: dict[str, str] = {}
    room = _METADATA_BYTES
    for key, value in metadata.items():
        texts = [str(text).encode(errors="replace") for text in (key, value)]
        if (needed := sum(len(text) + 3 for text in texts)) <= room:  # msgpack says each length
            room -= needed
            found[texts[0].decode()] = texts[1].decode()
    if len(found) < len(metadata):
        _log.warning(
            "paceline.init: %d of %d metadata are kept, %d bytes at most",
            *(len(found), len(metadata), _METADATA_BYTES),
        )
    return found


def clock_offset_ns() -> int:
    """CLOCK_REALTIME - CLOCK_MONOTONIC, from the tightest of a few readings."""
    best: tuple[int, int] | None = None
    for _ in range(5):
        before = time.perf_counter_ns()
        realtime = time.time_ns()
        after = time.perf_counter_ns()
        reading = (after - before, realtime - (before + after) // 2)
        best = reading if best is None else min(best, reading)
    assert best is not None
    return best[1]


def process_started_ns() -> int | None:
    """CLOCK_MONOTONIC of the start of this process, or None where /proc does not tell."""
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        since_boot_ns = int(fields[19]) * 1_000_000_000 // os.sysconf("SC_CLK_TCK")
        suspended_ns = time.clock_gettime_ns(time.CLOCK_BOOTTIME) - time.perf_counter_ns()
    except (OSError, ValueError, IndexError, AttributeError):
        return None
    return max(0, since_boot_ns - suspended_ns)


def is_helper_of(ring_path: Path) -> bool:
    """Whether the ring is that of a process above this one, which is still writing it.

    A loader's worker that is spawned runs the script's top again, in the environment of its rank.
    The agent has the ring mapped too, and may be above both.
    """
    try:
        with closing(RingReader(ring_path)) as reader:
            writer = reader.identity.pid
        pid = os.getppid()
        while pid != writer:
            pid = int(Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[1])
        mapped = os.fsencode(f" {ring_path.resolve()}\n")
        return mapped in Path(f"/proc/{writer}/maps").read_bytes()
    except (RingError, OSError, ValueError, IndexError):  # none, or all up to process 1 are others
        return False


def place(
    rank: int,
    topology: Topology,
    mesh: Any | None,
    given: Mapping[str, int | None],
) -> tuple[Topology, Coordinates]:
    """Sizes and coordinates: from a `DeviceMesh`, else arguments, else the layout of `topology`."""
    sizes = {"dp": topology.dp, "pp": topology.pp, "tp": topology.tp}
    if mesh is not None and mesh.mesh_dim_names:
        sizes, found = _of_mesh(mesh)
    elif rank < topology.world_size:
        standing = topology.coordinates(rank)
        found = {"dp": standing.dp_rank, "pp": standing.pp_rank, "tp": standing.tp_rank}
    else:
        found = {}
    for axis, coordinate in given.items():
        if coordinate is not None:
            found[axis] = coordinate
    coordinates = Coordinates(found.get("dp", 0), found.get("pp", 0), found.get("tp", 0))
    return Topology(sizes["dp"], sizes["pp"], sizes["tp"]), coordinates


def _of_mesh(mesh: Any) -> tuple[dict[str, int], dict[str, int]]:
    """Several mesh dimensions of one axis (replicate x shard) multiply."""
    sizes = {"dp": 1, "pp": 1, "tp": 1}
    found = {"dp": 0, "pp": 0, "tp": 0}
    for dimension, name in enumerate(mesh.mesh_dim_names):
        axis = AXES.get(name)
        if axis is None:
            continue
        size = int(mesh.size(dimension))
        sizes[axis] *= size
        found[axis] = found[axis] * size + int(mesh.get_local_rank(dimension))
    return sizes, found


def _ring_directory(environment: Mapping[str, str]) -> Path | None:
    named = environment.get("PACELINE_RING_DIRECTORY")
    if named is not None:
        return Path(named) if named else None
    found = rings_of_running_agents()
    if len(found) > 1:
        choice = ", ".join(map(str, found))
        raise ValueError(f"several agents run here: set PACELINE_RING_DIRECTORY to one of {choice}")
    return found[0] if found else None


def _place_in_job(environment: Mapping[str, str]) -> tuple[int, int, int]:
    """Rank, number of ranks, and rank on this node."""
    by_torchrun, *by_others = _LAUNCHERS
    local_rank = _integer(environment, "LOCAL_RANK", 0)
    distributed = sys.modules.get("torch.distributed")
    if "RANK" not in environment and distributed is not None and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size(), local_rank
    names = by_torchrun
    if "RANK" not in environment:
        found = (each for each in by_others if each[0] in environment and each[1] in environment)
        names = next(found, by_torchrun)
    rank, world_size, local = names
    return (
        _integer(environment, rank, 0),
        _integer(environment, world_size, 1),
        _integer(environment, local, 0),
    )


def _job_name(environment: Mapping[str, str], world_size: int) -> str:
    """As whoever launched it knows it, else where it was launched.

    The same for all of its ranks, also those that torchrun starts again, and no other's: several
    run on one node, and many under one server.
    """
    host = socket.gethostname().partition(".")[0][:_HOST_LENGTH]
    address = environment.get("MASTER_ADDR", "")
    here = address in ("localhost", "::1") or address.startswith("127.")
    master = host if here else address[:_HOST_LENGTH]
    if job := environment.get("SLURM_JOB_ID"):
        return f"slurm-{job}"
    run = environment.get("TORCHELASTIC_RUN_ID", "")
    if _UUID.fullmatch(run):  # torchrun's own choice: nobody has to read all of it
        return f"torchrun-{run[:_UUID_LENGTH]}"
    if run not in ("", "none"):
        return f"torchrun-{run}"
    if run:
        return f"torchrun-{_launch_by_torchrun(environment, host) or master}"
    if world_size == 1:
        return f"{host}-{os.getpid()}"
    if space := environment.get("PMIX_NAMESPACE"):
        return f"mpirun-{space}"
    return f"{master}-{environment.get('MASTER_PORT', 0)}" if master else "local"


def _launch_by_torchrun(environment: Mapping[str, str], host: str) -> str | None:
    """Of one node: by the folder torchrun makes for each launch, FOLDER/attempt_0/0/error.json.

    The master's port is another one after a restart, and each rank's parent may be its own script.
    """
    folder, attempt, _ = environment.get("TORCHELASTIC_ERROR_FILE", "").partition("/attempt_")
    if not attempt or environment.get("GROUP_WORLD_SIZE") != "1":
        return None
    return f"{host}-{os.path.basename(folder).removeprefix('none_')}"


def _generation(environment: Mapping[str, str]) -> int:
    """Counts on with each restart by torchrun, and by hundreds where Slurm queues the job again."""
    first = _integer(environment, "PACELINE_GENERATION", 0)
    if "PACELINE_GENERATION" not in environment:
        first = 100 * _integer(environment, "SLURM_RESTART_COUNT", 0)
    return first + _integer(environment, "TORCHELASTIC_RESTART_COUNT", 0)


def _current_gpu_uuid() -> str | None:
    """Asked only of a CUDA context that exists: making one here could land on the wrong GPU."""
    cuda = sys.modules.get("torch.cuda")
    if cuda is None or not cuda.is_initialized():
        return None
    uuid = getattr(cuda.get_device_properties(cuda.current_device()), "uuid", None)
    return None if uuid is None else f"GPU-{uuid}"


def _integer(environment: Mapping[str, str], name: str, default: int) -> int:
    text = environment.get(name)
    if not text:
        return default
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{name} must be a whole number, got {text!r}") from None
