"""The exchange of values of any size between ranks."""

from __future__ import annotations

import os
from pathlib import Path
from traceback import StackSummary

from torch.distributed.checkpoint.api import CheckpointException

from paceline.checkpoints.errors import CheckpointError
from paceline.checkpoints.rank_group import RankGroup
from tests.forked_python import ForkedPython

RANKS = 3
SCRIPT = """
import sys
import torch.distributed as dist
from paceline.checkpoints.rank_group import RankGroup
rank = int(sys.argv[2])
dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=rank, world_size=3)
group = RankGroup(dist.group.WORLD)
for size in (0, 1, 4000, 4040, 4050, 4060, 4096, 5000, 1_000_000):
    for large in (None, 0, 1, 2):  # only this rank has a large value
        values = [bytes([each]) * (size if large in (None, each) else 3) for each in range(3)]
        assert group.gather(values[rank]) == values, (size, large)
        assert group.from_first(values[rank]) == values[0], (size, large)
assert group.gather({"rank": rank, "nothing": None})[1] == {"rank": 1, "nothing": None}
assert group.on_rank_0(lambda: 1 / 1) is None
def fail():
    raise OSError("full " * 2000)
assert group.on_rank_0(fail).endswith("(rank 0)")
print("same")
dist.destroy_process_group()
"""


def test_values_of_any_size_are_exchanged(tmp_path: Path) -> None:
    arguments = ["-c", SCRIPT, str(tmp_path / "store")]
    ranks = [ForkedPython([*arguments, str(rank)], os.environ) for rank in range(RANKS)]
    for rank in ranks:
        output, errors = rank.communicate(timeout=100)
        assert output == "same\n", errors


def test_a_failure_of_another_rank_that_torch_collected_has_its_rank() -> None:
    def fail() -> None:
        error = OSError(30, "Read-only file system")
        raise CheckpointException("write", {1: (error, StackSummary())})

    def fail_with_cause() -> None:
        try:
            fail()
        except CheckpointException as error:
            raise CheckpointError("read-only") from error

    assert RankGroup(None).attempt(fail) == "[Errno 30] Read-only file system (rank 1)"
    assert RankGroup(None).attempt(fail_with_cause) == "read-only (rank 1)"
