"""Where this rank runs: the launcher's environment, the device mesh and the process itself.

The only module of the hooks that reads `os.environ`. It does not import torch, but uses it if the
script has already loaded it.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.cuda import device_in_use, initialized_cuda
from paceline_wire.job_name import as_job_name
from paceline_wire.metadata import (
    KUBERNETES_JOB,
    KUBERNETES_NODE,
    KUBERNETES_RESTARTS,
    KUBERNETES_UID,
    SLURM_JOB,
    SLURM_NODE,
    SLURM_RESTARTS,
    TORCHRUN_LEAST_NODES,
    TORCHRUN_MAX_RESTARTS,
    TORCHRUN_RESTARTS,
    TORCHRUN_RUN,
    TORCHRUN_SHARES_STORE,
)
from paceline_wire.node_directory import rings_of_running_agents
from paceline_wire.ring import (
    DEFAULT_CAPACITY,
    STATE_STATUS,
    SUFFIX,
    Identity,
    RingError,
    RingReader,
    Status,
)
from paceline_wire.topology import DEFAULT_LAYOUT, Axis, Coordinates, Topology

_log = logging.getLogger(__name__)

# Common names of the axes in `init_device_mesh`.
AXES: dict[str, Axis] = {
    "dp": "dp",
    "data": "dp",
    "dp_replicate": "dp",
    "dp_shard": "dp",
    "replicate": "dp",
    "shard": "dp",
    "fsdp": "dp",
    "ddp": "dp",
    "hsdp": "dp",
    "dp_shard_cp": "dp",  # holds context-parallel ranks as well, which are taken out again
    "dp_cp": "dp",
    "dp_shard_mod_ep": "dp",
    "dp_shard_in_ep": "dp",
    "pp": "pp",
    "pipeline": "pp",
    "pipe": "pp",
    "tp": "tp",
    "tensor": "tp",
    "model": "tp",
    "mp": "tp",
    "cp": "cp",
    "context": "cp",
    "sp": "cp",
    "seq": "cp",
    "sequence": "cp",
    "ulysses": "cp",
    "ring": "cp",
    "ep": "ep",
    "expert": "ep",
    "experts": "ep",
}
# Names of dimensions that combine or divide the axes in another way, as torchtitan has them.
OTHER_DIMENSIONS = frozenset({"world", "loss", "batch", "etp", "efsdp", "default"})

# Variables of torchrun, srun and mpirun that identify this process: rank, number of ranks, local
# rank. An sbatch script is one process, without SLURM_STEP_NUM_TASKS.
_LAUNCHERS = (
    ("RANK", "WORLD_SIZE", "LOCAL_RANK"),
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
)

# Variables of a pod of a JobSet, from its labels and annotations (deploy/kubernetes/jobset.yaml):
# restarts by the JobSet controller, restarts in place, and restarts that Paceline asked for.
_JOBSET_RESTARTS = (
    "JOBSET_RESTART_ATTEMPT",
    "JOBSET_IN_PLACE_RESTART_ATTEMPT",
    "PACELINE_KUBERNETES_RESTARTS",
)

# 4 Gbit/s of a node, a small share of the links between nodes that train.
PEER_BYTES_PER_SECOND = 500_000_000

_started_ns: int | None = None  # CLOCK_MONOTONIC; None: with the process
_parent = os.getppid()

_BEFORE_STEPS = (Status.LOADING, Status.JOINING, Status.STARTING)
_METADATA_BYTES = 3000  # leaves room on the identity page for its other fields
_JOB_LENGTH = 64
_HOST_LENGTH = 40  # leaves room for the rest of a job name
_UUID = re.compile("[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_UUID_LENGTH = 13  # 48 bits
_SCRIPT_LENGTH = 64
_RAY_WORKER = "default_worker.py"


@dataclass(frozen=True, slots=True)
class RankEnvironment:
    """The settings of this rank from `PACELINE_*` and the launcher's variables."""

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
        """The path of this rank's ring file."""
        return self.ring_directory / f"{self.job}.g{self.generation}.r{self.rank}{SUFFIX}"


def prefers_pure_python() -> bool:
    """Return whether `PACELINE_PURE_PYTHON` asks for the writer in Python."""
    return bool(os.environ.get("PACELINE_PURE_PYTHON"))


def builds_libraries() -> bool:
    """Return whether a rank may build a library in the background; `PACELINE_BUILD=0` says no."""
    return os.environ.get("PACELINE_BUILD") != "0"


def agent_directory() -> Path | None:
    """Return the directory of the agent that started this rank; None for external jobs."""
    directory = os.environ.get("PACELINE_NODE_DIRECTORY")
    return Path(directory) if directory else None


def may_be_started_again() -> bool:
    """Return whether a launcher may restart this rank: torchrun, Slurm or Kubernetes."""
    if agent_directory() is not None:
        return False
    found = _launcher("", os.environ, os.getppid())
    restarts = found.get(TORCHRUN_MAX_RESTARTS, "0") != "0"
    return restarts or SLURM_JOB in found or KUBERNETES_JOB in found


def lost_torchrun() -> str | None:
    """Return that the torchrun which alone would start this rank again is gone; None: it is not."""
    if os.getppid() == _parent or agent_directory() is not None:
        return None
    found = _launcher("", os.environ, _parent)
    if TORCHRUN_RUN not in found or SLURM_JOB in found or KUBERNETES_JOB in found:
        return None
    return f"the torchrun of rank {os.environ.get('RANK')} is gone, and would not start it again"


def _in_child() -> None:
    global _parent
    _parent = os.getppid()


os.register_at_fork(after_in_child=_in_child)


def enter_generation(changed: Mapping[str, str]) -> None:
    """Make this process a rank of another generation, which starts now."""
    global _started_ns
    os.environ.update(changed)
    _started_ns = time.perf_counter_ns()


def is_restarted() -> bool:
    """Return whether this is not the first generation of a job of `paceline run`."""
    return _integer(os.environ, "PACELINE_GENERATION", 0) > 1


def master() -> tuple[str, int] | None:
    """Return where rank 0 listens; None on rank 0 itself, and where it is not known."""
    address, port = os.environ.get("MASTER_ADDR"), _integer(os.environ, "MASTER_PORT", 0)
    is_first = os.environ.get("RANK", "0") == "0"
    return None if is_first or not address or not port else (address, port)


def counts_flops() -> bool:
    """Return whether `PACELINE_COUNT_FLOPS` asks for a count of one step's FLOPs."""
    return os.environ.get("PACELINE_COUNT_FLOPS", "0") not in ("", "0")


def given_flops() -> dict[str, str]:
    """Return the FLOPs of the model and the device that the environment gives, as metadata."""
    names = ("flops_per_step", "flops_per_sample", "flops_per_token", "peak_flops")
    given = {name: os.environ.get(f"PACELINE_{name.upper()}", "") for name in names}
    return {name: value for name, value in given.items() if value}


def launched_world_size() -> int:
    """Return the number of ranks that the launcher started."""
    return _launcher_ranks(os.environ)[1]


def has_place() -> bool:
    """Return whether the environment identifies the job and the rank without a process group."""
    return all(os.environ.get(name) for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR"))


@dataclass(frozen=True, slots=True)
class MemorySettings:
    """The settings of copies in memory, from `PACELINE_MEMORY_*` and `PACELINE_PEER_*`."""

    root: Path | None  # None: there are no copies
    limit_bytes: int | None  # for all ranks of the node; None: half of its free memory
    overhead_ratio: float  # share of a step that copies may take
    peer_bytes_per_second: int  # for all ranks of the node; 0: no copies on others
    peer_address: str | None  # this node; None: its address towards MASTER_ADDR
    peer_tls: Path | None  # certificate and key of all ranks, in one file
    failure_domain: str  # what fails together with this node: its switch or rack
    boot: str  # identifies the node


def memory_settings() -> MemorySettings:
    """Return the settings of copies in memory. Raises ValueError if one is not a number."""
    environment = os.environ
    root = environment.get(
        "PACELINE_MEMORY_DIRECTORY", f"/dev/shm/paceline-checkpoints-{os.getuid()}"
    )
    limit = _integer(environment, "PACELINE_MEMORY_BYTES", 0)
    overhead = environment.get("PACELINE_MEMORY_OVERHEAD") or "0.005"
    tls = environment.get("PACELINE_PEER_TLS")
    # Slurm's topology plugin: the switches down to the node, separated by periods.
    switches = environment.get("SLURM_TOPOLOGY_ADDR", "").rpartition(".")[0]
    try:
        overhead_ratio = float(overhead)
    except ValueError:
        raise ValueError(f"PACELINE_MEMORY_OVERHEAD must be a number, got {overhead!r}") from None
    return MemorySettings(
        root=Path(root) if root else None,
        limit_bytes=limit or None,
        overhead_ratio=max(1e-6, overhead_ratio),
        peer_bytes_per_second=_integer(
            environment, "PACELINE_PEER_BYTES_PER_SECOND", PEER_BYTES_PER_SECOND
        ),
        peer_address=environment.get("PACELINE_PEER_ADDRESS") or None,
        peer_tls=Path(tls) if tls else None,
        failure_domain=environment.get("PACELINE_FAILURE_DOMAIN") or switches,
        boot=f"{socket.gethostname()} {_boot_id()}",
    )


def store_host() -> str | None:
    """Return the host of the store that the process group met at, if it is known."""
    address = _store_address()
    return os.environ.get("MASTER_ADDR") if address is None else address[0]


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def cache_directory() -> Path | None:
    """Return where this user's built libraries are kept, or None without a home directory."""
    home = os.environ.get("XDG_CACHE_HOME") or os.environ.get("HOME")
    if not home:
        return None
    root = Path(home) if os.environ.get("XDG_CACHE_HOME") else Path(home, ".cache")
    return root / "paceline"


def read_rank_environment(environment: Mapping[str, str] | None = None) -> RankEnvironment | None:
    """Return the settings of this rank, or None if no agent runs on this node.

    Without `PACELINE_RING_DIRECTORY`, running agents are discovered; an empty value disables the
    hooks.

    Args:
        environment: default `os.environ`.

    Raises:
        ValueError: a variable is not a number, or several agents run on this node.
    """
    environment = os.environ if environment is None else environment
    directory = _ring_directory(environment)
    if directory is None:
        return None
    rank, world_size, local_rank = _launcher_ranks(environment)
    dp, pp, tp, cp, ep = (
        _integer(environment, f"PACELINE_{axis}", 1) for axis in ("DP", "PP", "TP", "CP", "EP")
    )
    topology = Topology(dp, pp, tp, cp, ep)
    if topology.world_size != world_size:
        topology = Topology(dp=world_size)
    return RankEnvironment(
        ring_directory=directory,
        job=as_job_name(environment.get("PACELINE_JOB") or _job_name(environment, world_size)),
        generation=_generation(environment),
        rank=rank,
        local_rank=local_rank,
        world_size=world_size,
        topology=topology,
        capacity=_integer(environment, "PACELINE_RING_CAPACITY", DEFAULT_CAPACITY),
        gpu_uuid=environment.get("PACELINE_GPU_UUID") or _used_gpu_uuid(),
    )


def identify(
    rank_environment: RankEnvironment,
    topology: Topology,
    coordinates: Coordinates,
    metadata: Mapping[str, str],
    environment: Mapping[str, str] | None = None,
) -> Identity:
    """Return the identity that the ring's first page holds.

    `environment`: of a rank that this process has started; default: this process is the rank, and
    the calling thread records.
    """
    torchrun = os.getppid() if environment is None else os.getpid()
    thread = threading.get_native_id() if environment is None else None
    environment = os.environ if environment is None else environment
    launcher = _launcher(rank_environment.job, environment, torchrun)
    detected = {"python": sys.version.split()[0], **_script(), **launcher}
    torch = sys.modules.get("torch")
    if torch is not None:
        detected["torch"] = str(torch.__version__)
    monotonic_ns = time.perf_counter_ns()
    return Identity(
        job=rank_environment.job,
        generation=rank_environment.generation,
        rank=rank_environment.rank,
        local_rank=rank_environment.local_rank,
        world_size=rank_environment.world_size,
        topology=topology,
        coordinates=coordinates,
        pid=os.getpid(),
        host=socket.gethostname(),
        clock_offset_ns=clock_offset_ns(),
        started_ns=monotonic_ns,
        gpu_uuid=rank_environment.gpu_uuid,
        metadata=detected | _truncate_metadata(metadata),
        native_thread_id=thread,
    )


def _script() -> dict[str, str]:
    """Return the script's name as metadata; empty for `python -c` and an interactive shell, and for
    a worker of Ray, whose program is Ray's own."""
    program = Path((sys.argv or [""])[0])
    name = program.parent.name if program.name == "__main__.py" else program.name
    name = name.encode(errors="replace").decode()  # a file name may not be UTF-8
    is_script = name and not name.startswith("-") and name != _RAY_WORKER
    return {"script": name[:_SCRIPT_LENGTH]} if is_script else {}


def _launcher(own_job: str, environment: Mapping[str, str], torchrun: int) -> dict[str, str]:
    """Return the launchers as metadata.

    `own_job`: the job name of this rank. `torchrun`: the process that is torchrun, if any is.
    """
    found: dict[str, str] = {}
    if "TORCHELASTIC_RUN_ID" in environment:  # torchrun also reports how its ranks end
        found = {
            "launcher": "torchrun",
            TORCHRUN_RUN: own_job,
            TORCHRUN_RESTARTS: environment.get("TORCHELASTIC_RESTART_COUNT") or "0",
            TORCHRUN_MAX_RESTARTS: environment.get("TORCHELASTIC_MAX_RESTARTS") or "0",
        }
        if least := _least_nodes(torchrun):
            found[TORCHRUN_LEAST_NODES] = least
        if environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            found[TORCHRUN_SHARES_STORE] = "1"
    if (jobset := _jobset(environment)) is not None:
        found[KUBERNETES_JOB] = "/".join(jobset)
        found[KUBERNETES_NODE] = environment.get("NODE_NAME", "")
        found[KUBERNETES_RESTARTS] = str(_jobset_restarts(environment))
        if uid := environment.get("JOBSET_UID"):
            found[KUBERNETES_UID] = uid
    job, node = environment.get("SLURM_JOB_ID"), environment.get("SLURMD_NODENAME")
    if job and node:
        restarts = environment.get("SLURM_RESTART_COUNT") or "0"
        found |= {SLURM_JOB: job, SLURM_NODE: node, SLURM_RESTARTS: restarts}
    return found


def _least_nodes(torchrun: int) -> str | None:
    """Return the smallest number of nodes that this torchrun accepts (--nnodes=LEAST:MOST).

    None if it was not started by its command, or has no such option.
    """
    try:
        words = Path(f"/proc/{torchrun}/cmdline").read_text(errors="replace").split("\0")
    except OSError:
        return None
    for word, value in zip(words, [*words[1:], ""], strict=True):
        option, equals, given = word.partition("=")
        if option.replace("_", "-") == "--nnodes":
            least = (given if equals else value).partition(":")[0]
            return least if least.isdecimal() else None
    return None


def _jobset(environment: Mapping[str, str]) -> tuple[str, str] | None:
    """Return the namespace and the name of the JobSet that this pod belongs to, if there is one."""
    namespace, name = environment.get("POD_NAMESPACE"), environment.get("JOBSET_NAME")
    return (namespace, name) if namespace and name else None


def _jobset_name(namespace: str, name: str) -> str:
    """Return a job name; if the names are too long for one, a hash tells them from others."""
    full = f"jobset-{namespace}.{name}"
    if len(full) <= _JOB_LENGTH:
        return full
    digest = hashlib.sha256(full.encode()).hexdigest()[:8]
    return f"{full[: _JOB_LENGTH - 9]}-{digest}"


def _jobset_restarts(environment: Mapping[str, str]) -> int:
    return sum(_integer(environment, name, 0) for name in _JOBSET_RESTARTS)


def _truncate_metadata(metadata: Mapping[str, str]) -> dict[str, str]:
    """Return the first entries that fit: users pass whole configurations, and a page is 4 KiB."""
    accepted: dict[str, str] = {}
    free_bytes = _METADATA_BYTES
    for key, value in metadata.items():
        encoded = [str(text).encode(errors="replace") for text in (key, value)]
        # Up to three bytes of msgpack header each.
        if (needed := sum(len(text) + 3 for text in encoded)) <= free_bytes:
            free_bytes -= needed
            accepted[encoded[0].decode()] = encoded[1].decode()
    if len(accepted) < len(metadata):
        _log.warning(
            "paceline.init: kept %d of %d metadata entries; the limit is %d bytes",
            *(len(accepted), len(metadata), _METADATA_BYTES),
        )
    return accepted


def clock_offset_ns() -> int:
    """Return CLOCK_REALTIME - CLOCK_MONOTONIC, from the tightest of five readings."""
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
    """Return CLOCK_MONOTONIC at the start of this rank, or None if /proc does not have it."""
    if _started_ns is not None:
        return _started_ns
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        since_boot_ns = int(fields[19]) * 1_000_000_000 // os.sysconf("SC_CLK_TCK")
        suspended_ns = time.clock_gettime_ns(time.CLOCK_BOOTTIME) - time.perf_counter_ns()
    except (OSError, ValueError, IndexError, AttributeError):
        return None
    return max(0, since_boot_ns - suspended_ns)


def recorded_since_ns(ring_path: Path) -> int | None:
    """Return `started_ns` of this process's earlier ring if no step was recorded there.

    Its launcher reserved it, or the recording starts again. None: there is no such ring.
    """
    try:
        with closing(RingReader(ring_path)) as reader:
            identity, status = reader.identity, reader.state[STATE_STATUS]
    except RingError:
        return None
    began = process_started_ns()
    if identity.pid != os.getpid() or began is None or identity.started_ns < began:
        return None  # an earlier process had the same pid
    return identity.started_ns if status in _BEFORE_STEPS else None


def is_descendant_of_writer(ring_path: Path) -> bool:
    """Return whether an ancestor of this process is still writing this ring.

    A spawned data loader worker runs the top of the script again, in the environment of its rank.
    The agent maps the ring too and may be an ancestor of both, so the writer's pid decides.
    """
    try:
        with closing(RingReader(ring_path)) as reader:
            writer = reader.identity.pid
        pid = os.getppid()
        while pid != writer:
            pid = int(Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[1])
        mapped = os.fsencode(f" {ring_path.resolve()}\n")
        return mapped in Path(f"/proc/{writer}/maps").read_bytes()
    except (RingError, OSError, ValueError, IndexError):  # no ring, or no ancestor writes it
        return False


def locate_rank(
    rank: int,
    topology: Topology,
    mesh: Any | None,
    given: Mapping[str, int | None],
) -> tuple[Topology, Coordinates]:
    """Return the axis sizes and this rank's coordinates.

    Args:
        rank: global.
        topology: used without a mesh.
        mesh: a `DeviceMesh`, or None.
        given: coordinates by axis that the user passed; they override the others.
    """
    sizes = {axis: topology.size(axis) for axis in DEFAULT_LAYOUT}
    if mesh is not None and mesh.mesh_dim_names:
        sizes, position = _locate_in_mesh(mesh)
    elif rank < topology.world_size:
        default = topology.coordinates(rank)
        position = {axis: default.on(axis) for axis in DEFAULT_LAYOUT}
    else:
        position = dict.fromkeys(DEFAULT_LAYOUT, 0)
    for axis in DEFAULT_LAYOUT:
        coordinate = given.get(axis)
        if coordinate is not None:
            position[axis] = coordinate
    order: tuple[Axis, ...] = ("dp", "pp", "tp", "cp", "ep")
    return (
        Topology(*(sizes[axis] for axis in order)),  # type: ignore[arg-type]
        Coordinates(*(position[axis] for axis in order)),
    )


def axis_of(name: str) -> Axis | None:
    """Return the axis of a mesh dimension by its name; None if the name is not known."""
    name = name.lower()
    for suffix in ("_parallel", "_mesh", "_rank"):
        name = name.removesuffix(suffix)
    return AXES.get(name)


def _locate_in_mesh(mesh: Any) -> tuple[dict[Axis, int], dict[Axis, int]]:
    """Return sizes and coordinates by axis; dimensions of one axis (replicate, shard) multiply."""
    sizes: dict[Axis, int] = dict.fromkeys(DEFAULT_LAYOUT, 1)
    position: dict[Axis, int] = dict.fromkeys(DEFAULT_LAYOUT, 0)
    for dimension, name in enumerate(mesh.mesh_dim_names):
        axis = axis_of(name)
        if axis is None:
            continue
        size = int(mesh.size(dimension))
        sizes[axis] *= size
        position[axis] = position[axis] * size + int(mesh.get_local_rank(dimension))
    return sizes, position


def _ring_directory(environment: Mapping[str, str]) -> Path | None:
    configured = environment.get("PACELINE_RING_DIRECTORY")
    if configured is not None:
        return Path(configured) if configured else None
    directories = rings_of_running_agents()
    if len(directories) > 1:
        choice = ", ".join(map(str, directories))
        raise ValueError(f"several agents run here: set PACELINE_RING_DIRECTORY to one of {choice}")
    return directories[0] if directories else None


def _launcher_ranks(environment: Mapping[str, str]) -> tuple[int, int, int]:
    """Return the rank, the number of ranks and the rank on this node."""
    torchrun, *others = _LAUNCHERS
    local_rank = _integer(environment, "LOCAL_RANK", 0)
    distributed = sys.modules.get("torch.distributed")
    if "RANK" not in environment and distributed is not None and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size(), local_rank
    variables = torchrun
    if "RANK" not in environment:
        present = (names for names in others if names[0] in environment and names[1] in environment)
        variables = next(present, torchrun)
    rank, world_size, local = variables
    return (
        _integer(environment, rank, 0),
        _integer(environment, world_size, 1),
        _integer(environment, local, 0),
    )


def _job_name(environment: Mapping[str, str], world_size: int) -> str:
    """Return the launcher's name for the job, or else a name made of where it was launched.

    All ranks of a job get the same name, also those that torchrun restarts. No two jobs share one:
    several may run on one node, and many under one server.
    """
    host = socket.gethostname().partition(".")[0][:_HOST_LENGTH]
    address, port = environment.get("MASTER_ADDR", ""), environment.get("MASTER_PORT", "0")
    if not address and world_size > 1:
        address, port = _store_address() or ("", port)
    is_local = address in ("localhost", "::1") or address.startswith("127.")
    master = host if is_local else address[:_HOST_LENGTH]
    if job := environment.get("SLURM_JOB_ID"):
        return f"slurm-{job}"
    if (jobset := _jobset(environment)) is not None:
        return _jobset_name(*jobset)
    run = environment.get("TORCHELASTIC_RUN_ID", "")
    if _UUID.fullmatch(run):  # torchrun's default: the beginning is unique enough
        return f"torchrun-{run[:_UUID_LENGTH]}"
    if run not in ("", "none"):
        return f"torchrun-{run}"
    if run:
        return f"torchrun-{_torchrun_launch_name(environment, host) or master}"
    if world_size == 1:
        return f"{host}-{os.getpid()}"
    if space := environment.get("PMIX_NAMESPACE"):
        return f"mpirun-{space}"
    return f"{master}-{port}" if master else "local"


def _store_address() -> tuple[str, str] | None:
    """Return the host and port of the TCP store that the process groups meet at; None elsewhere.

    A script that spawns its ranks and calls `init_process_group` with an address sets no variable.
    """
    distributed = sys.modules.get("torch.distributed.distributed_c10d")
    try:
        store: Any = None if distributed is None else distributed._get_default_store()
        while hasattr(store, "underlying_store"):
            store = store.underlying_store
        return (str(store.host), str(store.port)) if store is not None else None
    except (AttributeError, RuntimeError, ValueError):  # a store of another kind, or none yet
        return None


def _torchrun_launch_name(environment: Mapping[str, str], host: str) -> str | None:
    """Return a name for a torchrun launch on one node, or None.

    It is the folder that torchrun creates for each launch: FOLDER/attempt_0/0/error.json. The
    master port changes with a restart, and each rank may have a parent script of its own.
    """
    folder, attempt, _ = environment.get("TORCHELASTIC_ERROR_FILE", "").partition("/attempt_")
    if not attempt or environment.get("GROUP_WORLD_SIZE") != "1":
        return None
    return f"{host}-{os.path.basename(folder).removeprefix('none_')}"


def _generation(environment: Mapping[str, str]) -> int:
    """Return the generation: plus 1 per restart by torchrun, plus 100 per restart by the launcher
    of torchrun (Slurm, JobSet)."""
    first = _integer(environment, "PACELINE_GENERATION", 0)
    if "PACELINE_GENERATION" not in environment:
        requeues = _integer(environment, "SLURM_RESTART_COUNT", 0)
        first = 100 * (requeues + _jobset_restarts(environment))
    return first + _integer(environment, "TORCHELASTIC_RESTART_COUNT", 0)


def _used_gpu_uuid() -> str | None:
    """Return the UUID of the rank's GPU if the script has already created a CUDA context."""
    cuda = initialized_cuda()
    if cuda is None:
        return None
    used = device_in_use(cuda)
    device = cuda.current_device() if used is None else used
    uuid = getattr(cuda.get_device_properties(device), "uuid", None)
    return None if uuid is None else f"GPU-{uuid}"


def _integer(environment: Mapping[str, str], name: str, default: int) -> int:
    text = environment.get(name)
    if not text:
        return default
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{name} must be a whole number, got {text!r}") from None
