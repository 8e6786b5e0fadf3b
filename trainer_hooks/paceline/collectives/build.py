"""The library that records process groups, built for the torch of this environment.

It uses torch's C++ interface, which changes with each release, so it cannot be built together with
the rest of the package. `python -m paceline.collectives` builds it in about 15 s. A rank that finds
no library starts the build in the background, at the lowest priority, for the next run.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
import subprocess
import sys
import time
from functools import cache
from importlib.machinery import PathFinder
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from paceline.environment import builds_libraries, cache_directory

SOURCE = Path(__file__).with_name("_process_groups.cpp")
LONGEST_BUILD_SECONDS = 600.0


class BuildError(Exception):
    """The library cannot be built here; the message says why."""


def find_library() -> Path | None:
    """Return the library for the installed torch, or None if it was not built.

    Only a file that no other user could have written is used.
    """
    return next((path for path in _places() if _is_safe(path)), None)


def build() -> Path:
    """Build the library and return its path.

    Raises:
        BuildError: there is no torch, no C++ compiler, or no place to write to; or the compiler
            failed.
    """
    compiler = _compiler()
    if compiler is None:
        raise BuildError("no C++ compiler found; install g++")
    torch = _torch_directory()
    place = _writable_place()
    temporary = place.with_suffix(f".{os.getpid()}")
    command = [
        *(compiler, "-std=c++20", "-O2", "-fPIC", "-shared", "-w", str(SOURCE)),
        *(f"-I{torch / 'include'}", f"-I{torch / 'include/torch/csrc/api/include'}"),
        *("-DUSE_DISTRIBUTED", "-DUSE_C10D_GLOO", f"-L{torch / 'lib'}", "-lc10", "-ltorch_cpu"),
        *("-o", str(temporary)),
    ]
    try:
        subprocess.run(
            command, check=True, capture_output=True, text=True, timeout=LONGEST_BUILD_SECONDS
        )
        temporary.chmod(0o755)
        temporary.replace(place)
        _remove_older(place)
    except subprocess.CalledProcessError as error:
        lines = [line for line in error.stderr.splitlines() if "error" in line]
        reason = lines[0] if lines else error.stderr[-200:]
        raise BuildError(f"{compiler} failed: {reason}") from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(str(error)) from error
    finally:
        temporary.unlink(missing_ok=True)
    return place


def start_build() -> None:
    """Start the build in the background, unless another process of this node has just done so."""
    if not builds_libraries() or _compiler() is None:
        return
    try:
        lock = _writable_place().with_suffix(".building")
        if lock.exists() and time.time() - lock.stat().st_mtime < LONGEST_BUILD_SECONDS:
            return
        lock.unlink(missing_ok=True)
        os.close(os.open(lock, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        command = [sys.executable, "-P", "-m", "paceline.collectives"]
        if (nice := shutil.which("nice")) is not None:
            command = [nice, "-n", "19", *command]
        subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
    except (BuildError, OSError):
        return


def _places() -> list[Path]:
    """Return where the library may be: beside its source, or in the user's cache."""
    try:
        torch_version = _torch_version()
    except PackageNotFoundError:
        return []
    digest = hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:12]
    name = f"_process_groups.{torch_version}.{digest}.so"
    cache = cache_directory()
    return [SOURCE.parent / name, *([] if cache is None else [cache / name])]


@cache
def _torch_version() -> str:
    """Return the version of the installed torch, which is not imported for it."""
    return version("torch")


def _writable_place() -> Path:
    places = _places()
    if not places:
        raise BuildError("torch is not installed in this environment")
    for place in places:
        try:
            place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError:
            continue
        if os.access(place.parent, os.W_OK) and _is_private(place.parent.stat()):
            return place
    raise BuildError(f"cannot write to {' or '.join(str(place.parent) for place in places)}")


def _remove_older(place: Path) -> None:
    """Remove builds of other versions of the source, for the same torch."""
    version_of_torch = place.name.rsplit(".", 2)[0]
    for other in place.parent.glob(f"{version_of_torch}.*.so"):
        if other != place:
            other.unlink(missing_ok=True)


def _is_safe(path: Path) -> bool:
    try:
        file, directory = path.stat(), path.parent.stat()
    except OSError:
        return False
    return stat.S_ISREG(file.st_mode) and _is_private(file) and _is_private(directory)


def _is_private(status: os.stat_result) -> bool:
    """Return whether only root and this user can have written it."""
    return status.st_uid in (0, os.geteuid()) and not status.st_mode & 0o022


def _compiler() -> str | None:
    return next(
        (found for name in ("c++", "g++", "clang++") if (found := shutil.which(name))), None
    )


def _torch_directory() -> Path:
    found = PathFinder.find_spec("torch")
    if found is None or found.origin is None:
        raise BuildError("torch is not installed in this environment")
    return Path(found.origin).parent


def main() -> None:
    """Build the library unless it is there."""
    found = find_library()
    try:
        print(found if found is not None else build())
    except BuildError as error:
        sys.exit(f"paceline: collectives are recorded in Python, at a higher cost: {error}")
