"""Dumps of PyTorch's Flight Recorder: where a rank writes them, and when there is a new one.

PyTorch writes one by itself when a collective times out. The dump is a pickle: it is never loaded
here, only told of.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

# torch/csrc/distributed/c10d/FlightRecorder and NCCLUtils: newest name first
_PREFIXES = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
_DEFAULT_PREFIX = "/tmp/nccl_trace_rank_"


def dump_name(environment: Mapping[str, str], rank: int) -> str:
    prefixes = (environment[name] for name in _PREFIXES if environment.get(name))
    return f"{next(prefixes, _DEFAULT_PREFIX)}{rank}"


class DumpWatch:
    """Tells of a file once it is written whole, that is unchanged between two looks.

    One that is there at the first look is another run's.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._told = self._seen = self._look()

    def new_bytes(self) -> int | None:
        """Its size, if it is new since it was last told of."""
        before, self._seen = self._seen, self._look()
        if self._seen is None or self._seen != before or self._seen == self._told:
            return None
        self._told = self._seen
        return self._seen[0] or None

    def _look(self) -> tuple[int, int] | None:
        try:
            found = os.stat(self.path)
        except OSError:
            return None
        return found.st_size, found.st_mtime_ns
