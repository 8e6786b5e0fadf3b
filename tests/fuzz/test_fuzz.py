"""Any bytes are read or rejected without a crash and with bounded memory.

`make test` tries a hundred inputs per reader; `make campaign` a million, guided by coverage.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.fuzz.targets import TARGETS, FuzzTarget

CAMPAIGN_INPUTS = int(os.environ.get("FUZZ_INPUTS", "1000000"))
INTERESTING = [b"\0", b"\xff", b"\x7f", b"\x80", b"-1", b"\n", b"\xff" * 8, b"\xdf\xff\xff\xff\xff"]
edits = st.lists(
    st.tuples(
        st.sampled_from(["replace", "insert", "delete", "truncate", "repeat"]),
        st.floats(0.0, 1.0, exclude_max=True),
        st.sampled_from(INTERESTING) | st.binary(min_size=1, max_size=8),
    ),
    max_size=6,
)


@pytest.fixture(scope="module", params=TARGETS)
def target(request: pytest.FixtureRequest) -> Iterator[FuzzTarget]:
    with TARGETS[request.param]() as opened:
        yield opened


def edited(seed: bytes, changes: list[tuple[str, float, bytes]]) -> bytes:
    """Return `seed` after some edits, each at a position between 0 (begin) and 1 (end)."""
    data = seed
    for kind, place, new in changes:
        at = int(place * len(data))
        if kind == "truncate":
            data = data[:at]
        elif kind == "repeat":
            data = data[:at] + data[at // 2 : at] + data[at:]
        else:
            kept = at if kind == "insert" else at + len(new)
            data = data[:at] + (b"" if kind == "delete" else new) + data[kept:]
    return data


@settings(
    max_examples=100,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(data=st.data())
def test_any_input_is_read_or_refused(target: FuzzTarget, data: st.DataObject) -> None:
    seeds = target.seeds()
    seed = seeds[data.draw(st.integers(0, len(seeds) - 1))]
    target.read(data.draw(st.builds(edited, st.just(seed), edits) | st.binary(max_size=300)))
    target.finish()


@pytest.mark.campaign
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("name", TARGETS)
def test_a_million_inputs_guided_by_coverage(name: str, tmp_path: Path) -> None:
    pytest.importorskip("atheris", reason="atheris has no wheel for this version of Python")
    run = subprocess.run(
        [
            *(sys.executable, "-m", "tests.fuzz.run", name),
            *("--inputs", str(CAMPAIGN_INPUTS), "--artifacts", str(tmp_path)),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-4000:]
    figures = json.loads(run.stdout.splitlines()[-1])
    assert figures["inputs"] == CAMPAIGN_INPUTS
    assert name != "packed-batch" or figures["accepted"] == 0
    print(figures)
