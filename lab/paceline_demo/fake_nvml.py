"""Emulated GPUs: builds a `libnvidia-ml.so.1` and writes the state it reports.

Programs find the library through LD_LIBRARY_PATH and the state through PACELINE_FAKE_NVML_STATE,
and use the same pynvml calls as on a GPU node. `FIELDS` defines the state file; the C header is
generated from it.
"""

from __future__ import annotations

import ctypes
import hashlib
import mmap
import os
import shutil
import subprocess
import tempfile
import uuid
from collections.abc import Iterable, Mapping
from pathlib import Path

from paceline_demo.fake_nvml_fields import (
    CALLS,
    FIELDS,
    PROCESSES,
    TEXTS,
    THROTTLE_REASONS,
    f64,
    u32,
    u64,
)
from paceline_demo.fake_nvml_models import DRIVERS, MODELS

STATE_ENVIRONMENT = "PACELINE_FAKE_NVML_STATE"
LIBRARY = "libnvidia-ml.so.1"
MAGIC = 0x564E4650  # "PFNV"
VERSION = 5
MAXIMUM_GPUS = 16


class CompilerMissing(Exception):  # noqa: N818 - a state of the machine
    """There is no C compiler to build the emulated driver library."""


class CompilationFailed(Exception):  # noqa: N818
    """Compilation failed; the message contains the compiler's output."""


class _Gpu(ctypes.Structure):
    _fields_ = [
        *((name, kind) for name, kind, _ in FIELDS),
        *((name, ctypes.c_char * size) for name, size in TEXTS),
    ]


class _State(ctypes.Structure):
    _fields_ = [
        ("magic", u32),
        ("version", u32),
        ("gpu_count", u32),
        ("driver_unloaded", u32),
        ("cuda_version", u32),
        ("padding", u32),
        ("driver_version", ctypes.c_char * 32),
        ("gpus", _Gpu * MAXIMUM_GPUS),
    ]


def header() -> str:
    """Return the C header with the layout of the state file."""
    c_names: dict[object, str] = {u32: "uint32_t", u64: "uint64_t", f64: "double"}
    members = [f"    {c_names[kind]} {name};" for name, kind, _ in FIELDS]
    members += [f"    char {name}[{size}];" for name, size in TEXTS]
    bits = [f"#define CALL_{name.upper()} {bit:#x}ull" for name, bit in CALLS.items()]
    return "\n".join(
        [
            f"#define STATE_MAGIC {MAGIC:#x}u",
            f"#define STATE_VERSION {VERSION}u",
            f"#define STATE_GPUS {MAXIMUM_GPUS}",
            f"#define STATE_PROCESSES {PROCESSES}",
            *bits,
            "struct gpu {",
            *members,
            "};",
            "struct state {",
            "    uint32_t magic, version, gpu_count, driver_unloaded, cuda_version, padding;",
            "    char driver_version[32];",
            "    struct gpu gpus[STATE_GPUS];",
            "};",
            f'_Static_assert(sizeof(struct state) == {ctypes.sizeof(_State)}, "one layout");',
            "",
        ]
    )


def build(cache_directory: Path) -> Path:
    """Return the directory of the library for LD_LIBRARY_PATH; compile the library on first use.

    Concurrent callers each compile it, and the last rename wins with the same content.
    Raises CompilerMissing or CompilationFailed.
    """
    source = Path(__file__).with_suffix(".c").read_text()
    digest = hashlib.sha256((header() + source).encode()).hexdigest()[:16]
    directory = cache_directory / f"fake-nvml-{digest}"
    if not (directory / LIBRARY).exists():
        directory.mkdir(parents=True, exist_ok=True)
        _compile(source, directory)
    return directory


def _compile(source: str, directory: Path) -> None:
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc")
    if compiler is None or shutil.which(compiler) is None:
        raise CompilerMissing(
            "no C compiler (cc) found: install gcc or clang to have emulated GPU telemetry"
        )
    with tempfile.TemporaryDirectory(dir=directory, prefix=".build-") as scratch_name:
        scratch = Path(scratch_name)
        (scratch / "fake_nvml_state.h").write_text(header())
        (scratch / "fake_nvml.c").write_text(source)
        command = [compiler, "-std=gnu11", "-O1", "-Wall", "-Wextra", "-shared", "-fPIC"]
        command += [f"-Wl,-soname,{LIBRARY}", "-o", LIBRARY, "fake_nvml.c", "-lpthread"]
        done = subprocess.run(command, cwd=scratch, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise CompilationFailed(f"{compiler} failed: {done.stderr.strip()[-2000:]}")
        (scratch / LIBRARY).replace(directory / LIBRARY)


def environment(library_directory: Path, state: Path) -> dict[str, str]:
    """Return the environment variables that make the emulated GPUs visible to a program."""
    inherited = os.environ.get("LD_LIBRARY_PATH")
    path = f"{library_directory}:{inherited}" if inherited else str(library_directory)
    return {"LD_LIBRARY_PATH": path, STATE_ENVIRONMENT: str(state)}


class FakeGpus:
    """The state file of one node's emulated GPUs. Several programs may have it open."""

    def __init__(self, path: Path) -> None:
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), ctypes.sizeof(_State))
        self._state = _State.from_buffer(self._map)
        if (self._state.magic, self._state.version) != (MAGIC, VERSION):
            raise ValueError(f"{path} is not a state file of emulated GPUs, version {VERSION}")
        self.path = path

    @classmethod
    def create(cls, path: Path, count: int, model: str = "demo") -> FakeGpus:
        """Create a file with `count` healthy GPUs of one of MODELS.

        Its path determines their UUIDs.

        Raises ValueError unless 0 <= count <= MAXIMUM_GPUS, and for an unknown model.
        """
        if not 0 <= count <= MAXIMUM_GPUS:
            raise ValueError(f"a node has 0 to {MAXIMUM_GPUS} emulated GPUs, not {count}")
        if model not in MODELS:
            raise ValueError(f"expected one of {', '.join(MODELS)}, not {model!r}")
        state = _State(magic=MAGIC, version=VERSION, gpu_count=count)
        driver, state.cuda_version = DRIVERS[model]
        state.driver_version = driver.encode()
        for index in range(count):
            gpu = state.gpus[index]
            for name, _, value in FIELDS:
                setattr(gpu, name, value)
            gpu.uuid = f"GPU-{uuid.uuid5(uuid.NAMESPACE_URL, f'{path.resolve()}#{index}')}".encode()
            gpu.pci_bus_id = f"00000000:{0x1A + 0x11 * index:02X}:00.0".encode()
            gpu.name, gpu.vbios = b"NVIDIA H200", b"96.00.A5.00.03"
            for name, override in MODELS[model].items():
                setattr(
                    gpu,
                    name,
                    override.encode() if isinstance(override, str) else _written(name, override),
                )
        partial = path.with_name(f".{path.name}.{os.getpid()}")
        partial.write_bytes(bytes(state))
        partial.replace(path)
        return cls(path)

    @classmethod
    def open(cls, path: Path) -> FakeGpus:
        return cls(path)

    @property
    def count(self) -> int:
        return int(self._state.gpu_count)

    def set_driver(self, *, loaded: bool = True, version: str | None = None) -> None:
        """Unload the driver while programs use it, or load it again."""
        self._state.driver_unloaded = not loaded
        if version is not None:
            self._state.driver_version = version.encode()

    def set_processes(self, gpu: int, used_bytes: Mapping[int, int]) -> None:
        """Set the compute processes of a GPU, by pid. Raises ValueError for more than PROCESSES."""
        if len(used_bytes) > PROCESSES:
            raise ValueError(f"an emulated GPU has at most {PROCESSES} processes")
        slots = [*used_bytes.items(), *[(0, 0)] * (PROCESSES - len(used_bytes))]
        for slot, (pid, used) in enumerate(slots):
            self.set(gpu, **{f"process_pid_{slot}": pid, f"process_bytes_{slot}": used})

    def set_utilization(self, gpu: int, percents: Mapping[int, int]) -> None:
        """Set the share of the SMs' time that compute processes use, by pid, in percent."""
        target = self._gpu(gpu)
        for slot in range(PROCESSES):
            pid = getattr(target, f"process_pid_{slot}")
            self.set(gpu, **{f"process_percent_{slot}": percents.get(pid, 0)})

    def drop(self, gpu: int) -> None:
        """Remove a GPU from the bus; a new initialization renumbers the GPUs behind it."""
        self._gpu(gpu)
        for index in range(gpu, self.count - 1):
            self._state.gpus[index] = self._state.gpus[index + 1]
        self._state.gpu_count -= 1

    def set(self, gpu: int, **values: float | Iterable[str]) -> None:
        """Write fields of `FIELDS`; `throttle_reasons` and those of CALLS' bits also take names.

        Raises ValueError for an unknown field or name, IndexError for an unknown GPU.
        """
        target = self._gpu(gpu)
        for name, value in values.items():
            if name not in _FIELD_NAMES:
                raise ValueError(f"emulated GPUs have no field {name!r}")
            setattr(target, name, _written(name, value))
            if name == "xid":
                target.xid_count += 1

    def set_text(self, gpu: int, name: str, value: bytes) -> None:
        """Set a string of a GPU; the bytes need not be valid UTF-8."""
        setattr(self._gpu(gpu), name, value)

    def get(self, gpu: int, name: str) -> float:
        if name not in _FIELD_NAMES:
            raise ValueError(f"emulated GPUs have no field {name!r}")
        value: float = getattr(self._gpu(gpu), name)
        return value

    def reset(self, gpu: int) -> None:
        """Make a GPU healthy again; its counters keep their values, because they never decrease."""
        for name, _, value in FIELDS:
            if name in _CONDITIONS:
                setattr(self._gpu(gpu), name, value)

    def close(self) -> None:
        del self._state
        self._map.close()

    def _gpu(self, gpu: int) -> _Gpu:
        if not 0 <= gpu < self.count:
            raise IndexError(f"this node has {self.count} emulated GPUs, not one of index {gpu}")
        found: _Gpu = self._state.gpus[gpu]
        return found


_KINDS = {name: kind for name, kind, _ in FIELDS}
_FIELD_NAMES = frozenset(_KINDS)
_CONDITIONS = frozenset(
    {
        "lost",
        "error",
        "failing",
        "hang_seconds",
        "throttle_reasons",
        "sm_clock_mhz",
        "memory_clock_mhz",
        "temperature_celsius",
        "memory_temperature_celsius",
        "power_milliwatts",
        "utilization_percent",
        "memory_utilization_percent",
        "pcie_generation",
        "pcie_width",
        "nvlink_links_active",
    }
)
_NAMED_BITS = {
    "throttle_reasons": THROTTLE_REASONS,
    "unsupported": CALLS,
    "denied": CALLS,
    "failing": CALLS,
}


def _written(name: str, value: float | Iterable[str]) -> float | int:
    number = _number(name, value)
    return number if _KINDS[name] is f64 else int(number)


def _number(name: str, value: float | Iterable[str]) -> float:
    if isinstance(value, int | float):
        return value
    bits = _NAMED_BITS.get(name)
    if bits is None:
        raise ValueError(f"{name} takes a number")
    total = 0
    for word in value:
        if word not in bits:
            raise ValueError(f"{name}: expected one of {', '.join(bits)}, not {word!r}")
        total |= bits[word]
    return total
