"""The process that asks Slurm is killed before and after each of its commands: each request is
carried out once. The daemons of Slurm are real."""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from committed_requests import CommittedRequests
from slurm_cluster import SlurmCluster

from paceline_server.engine.types import Launch

pytestmark = [pytest.mark.campaign, pytest.mark.timeout(3000)]
KILLS = int(os.environ.get("PACELINE_SLURM_KILLS", "200"))
COMMANDS = (  # in the order in which they are run for one request
    "squeue -h",
    "scontrol show",
    "sinfo -h",
    "scontrol update NodeName",
    "scontrol requeuehold",
    "scontrol update JobId",
    "scontrol release",
)
MOMENTS = [f"{when} {command}" for command in COMMANDS for when in ("before", "after")]
HERE = Path(__file__).parent


class Requests(CommittedRequests):
    """A database with a job of Slurm, and the process that carries out its requests."""

    def __init__(self, slurm: SlurmCluster, directory: Path) -> None:
        self.slurm, self.directory = slurm, directory
        self.kill_at = directory / "kill"
        commands = directory / "bin"
        commands.mkdir()
        for name in ("scontrol", "squeue", "sinfo"):
            shutil.copy(HERE / "deadly_command.sh", commands / name)
        real = shutil.which("scontrol")
        assert real is not None
        environment = slurm.environment | {
            "PATH": f"{commands}:{os.environ['PATH']}",
            "PACELINE_KILL": str(self.kill_at),
            "PACELINE_SLURM_BIN": str(Path(real).parent),
        }
        script = directory / "job.sh"
        script.write_text(
            "#!/bin/bash\n#SBATCH -N2 --ntasks-per-node=1 --exclusive -o /dev/null\n"
            f"srun bash -c 'echo $SLURM_RESTART_COUNT >> {directory}/starts; sleep 3600'\n"
        )
        self.job = slurm.submit(script)
        super().__init__(directory, f"slurm-{self.job}", environment)

    def starts(self) -> int:
        """Return how many ranks were started in all runs of the job."""
        path = self.directory / "starts"
        return len(path.read_text().splitlines()) if path.exists() else 0

    def launch(self, restarts: int) -> Launch:
        nodes = {node: node for node in self.nodes()}
        return Launch(launcher="slurm", job=self.job, restarts=restarts, nodes=nodes)

    def nodes(self) -> list[str]:
        """Return the nodes that run the job."""
        listed = self.slurm.job(self.job).get("NodeList", "(null)")
        expanded = self.slurm.control("show", "hostnames", listed)
        return expanded.split() if listed != "(null)" else []

    def close(self) -> None:
        super().close()
        self.slurm.cancel(self.job)


@pytest.fixture
def requests(slurm: SlurmCluster, tmp_path: Path) -> Iterator[Requests]:
    opened = Requests(slurm, tmp_path)
    yield opened
    opened.close()


def test_each_request_is_carried_out_once_whenever_the_process_is_killed(
    slurm: SlurmCluster,
    requests: Requests,
    wait_for: Callable[..., Any],
    capsys: pytest.CaptureFixture[str],
) -> None:
    wait_for(lambda: requests.starts() == 2, "the first run")
    kills = 0
    for restarts in itertools.count():
        if kills >= KILLS:
            break
        action_id = f"act-{restarts:08}"
        (excluded, *_) = requests.nodes()
        pending = list(MOMENTS)
        requests.request(action_id, requests.launch(restarts), [excluded])

        armed: list[str] = []

        def advance(
            action_id: str = action_id, pending: list[str] = pending, armed: list[str] = armed
        ) -> bool:
            """Have the process killed at the next moment; start it again after its death."""
            nonlocal kills
            if armed and not requests.kill_at.exists():
                kills += 1
                armed.clear()
            if not armed and pending:
                armed.append(pending.pop(0))
                requests.kill_at.write_text(armed[0])
            requests.ensure_process()
            return requests.result(action_id).state != "waiting"

        wait_for(advance, "the restart", seconds=240.0)
        requests.kill_at.unlink(missing_ok=True)
        assert requests.result(action_id).state == "done", requests.result(action_id)
        wait_for(lambda count=restarts: requests.starts() >= 2 * (count + 2), "both ranks")
        assert slurm.job(requests.job)["Restarts"] == str(restarts + 1), "lost or twice"
        assert requests.starts() == 2 * (restarts + 2), "each rank was started once"
        assert excluded not in requests.nodes()
        assert action_id in slurm.drain_reason(excluded)
        slurm.resume(excluded)
    with capsys.disabled():
        print(f"\nkilled {kills} times in {restarts} requests: none lost, none carried out twice")
