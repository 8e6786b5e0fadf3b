"""Fuzz one target, guided by coverage (atheris):

    python -m tests.fuzz.run TARGET --inputs N

Exit status 0 after N inputs without a crash; the last line is JSON with what was done. Any other
status is a crash, a hang (20 s for one input) or too much memory; the input is then written to
`--artifacts`.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import resource
import shutil
import sys
import tempfile
import time
from pathlib import Path

import atheris

_PACKAGES = ("paceline_wire", "paceline_agent", "paceline_server")
# atheris stores the result of each comparison of arrays, so memory grows with the inputs.
_COMPARE_ARRAYS = (
    "paceline_server.whatif.analysis",
    "paceline_server.whatif.columns",
    "paceline_server.whatif.replay",
    "paceline_server.whatif.trace",
)
_MEMORY_MIB = 1536  # the libraries take 300 to 500 of it
_INPUT_SECONDS = 20
_WARM_UP = 1000  # number of inputs after which the reference memory is measured


def main() -> None:
    with atheris.instrument_imports(
        include=list(_PACKAGES), exclude=list(_COMPARE_ARRAYS), enable_loader_override=False
    ):
        from tests.fuzz.targets import TARGETS  # noqa: PLC0415 (instrumented while it is imported)

    logging.disable()  # otherwise each rejected input would log a line
    parser = argparse.ArgumentParser()
    parser.add_argument("target", choices=TARGETS)
    parser.add_argument("--inputs", type=int, default=1_000_000)
    parser.add_argument("--artifacts", type=Path, default=Path())
    arguments = parser.parse_args()
    counts = {"inputs": 0, "accepted": 0}
    begun = time.monotonic()
    with TARGETS[arguments.target]() as target:

        def read(data: bytes) -> None:
            counts["inputs"] += 1
            counts["accepted"] += target.read(data)
            if counts["inputs"] == _WARM_UP:
                counts["resident_mib_at_start"] = _resident_mib()
            if counts["inputs"] < arguments.inputs:
                return
            target.finish()
            target.__exit__()  # libFuzzer never returns
            shutil.rmtree(corpus)
            figures = counts | {
                "target": arguments.target,
                "seconds": round(time.monotonic() - begun),
                "resident_mib": _resident_mib(),
            }
            print("\n" + json.dumps(figures), flush=True)
            os._exit(0)

        corpus = Path(tempfile.mkdtemp(prefix="paceline-corpus-"))
        for number, seed in enumerate(target.seeds()):
            (corpus / str(number)).write_bytes(seed)
        options = [
            f"-max_len={target.longest_bytes}",
            f"-rss_limit_mb={_MEMORY_MIB}",
            f"-timeout={_INPUT_SECONDS}",
            f"-artifact_prefix={arguments.artifacts}/",
        ]
        atheris.Setup([sys.argv[0], *options, str(corpus)], read)
        atheris.Fuzz()


def _resident_mib() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10


if __name__ == "__main__":
    main()
