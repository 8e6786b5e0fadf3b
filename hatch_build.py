"""Compile the hooks' hot path if there is a C compiler; without one, the hooks run in Python."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

PACKAGE = Path("trainer_hooks", "paceline", "writer")
LIBRARY = PACKAGE / "_native.abi3.so"  # stable ABI: one build for every Python from 3.11


class WriterBuildHook(BuildHookInterface):  # type: ignore[misc]
    """Build the library into the wheel, or beside its source for an editable install."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        failure = self._compile() if sys.platform == "linux" else "the library needs Linux"
        if failure:
            self.app.display_warning(
                f"the hooks' C library was not built, they run in Python: {failure}"
            )
            return
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["pure_python"] = False
        build_data["tag"] = f"cp311-abi3-{platform}"
        build_data["artifacts"].append(f"/{LIBRARY}")

    def _compile(self) -> str | None:
        """Build the library. Return the reason if it failed."""
        compiler = shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc")
        if shutil.which(compiler[0]) is None:
            compiler = ["cc"]
        library = Path(self.root, LIBRARY)
        # Replaced by rename, never overwritten: a training process may have it mapped.
        temporary = library.with_suffix(f".{os.getpid()}")
        command = [
            *(*compiler, "-O2", "-fno-plt", "-shared", "-fPIC", "-fvisibility=hidden"),
            *("-I", sysconfig.get_path("include"), "-o", str(temporary)),
            str(Path(self.root, PACKAGE, "_native.c")),
        ]
        try:
            result = subprocess.run(command, capture_output=True, text=True)
        except OSError as error:
            return str(error)
        if result.returncode:
            return result.stderr.strip() or f"{command[0]} exited with {result.returncode}"
        temporary.replace(library)
        return None
