"""The torchrun backend on a real database: what it refuses, what it sends, and that once.

That real torchruns do what is played here is tested by test_torchrun_repairs.py.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from committed_requests import CommittedRequests
from msgspec.structs import replace
from sqlalchemy import update
from torchrun_world import JOB, TorchrunWorld

from paceline_server.decide.types import LaunchRequest
from paceline_server.launchers.torchrun import TorchrunLauncher
from paceline_server.store.models import AttachmentRow, RankRow

KILLS = int(os.environ.get("PACELINE_TORCHRUN_KILLS", "200"))
MOMENTS = [
    "before UPDATE launches",
    "after UPDATE launches",
    "committed UPDATE launches",
    "before UPDATE counters",
    "after UPDATE counters",
    "before INSERT INTO commands",
    "after INSERT INTO commands",
    "committed INSERT INTO commands",
    "committed UPDATE launches",  # while the ranks end
]


@pytest.fixture
def kill_at(tmp_path: Path) -> Path:
    return tmp_path / "kill"


@pytest.fixture
def requests(tmp_path: Path, kill_at: Path) -> Iterator[CommittedRequests]:
    environment = {**os.environ, "PACELINE_KILL_AT_STATEMENT": str(kill_at)}
    opened = CommittedRequests(tmp_path, JOB, environment)
    yield opened
    opened.close()


@pytest.fixture
def world(requests: CommittedRequests) -> TorchrunWorld:
    return TorchrunWorld(requests)


def request_of(world: TorchrunWorld, *exclude: str, action: str = "act-1") -> LaunchRequest:
    world.requests.request(action, world.launch(), list(exclude), world.generation)
    return LaunchRequest(
        action_id=action,
        kind="restart",
        launch=world.launch(),
        exclude=list(exclude),
        reason="Rank 1 is hung.",
    )


def test_only_torchruns_that_may_restart_and_own_the_job_are_recognized() -> None:
    def rank(restarts: str = "1", most: str = "3", **more: str) -> dict[str, str]:
        found = {"torchrun_run": JOB, "torchrun_restarts": restarts}
        return found | {"torchrun_max_restarts": most} | more

    recognize = TorchrunLauncher.recognize
    found = recognize({"n0": rank(), "n1": rank("2")})
    assert found is not None
    assert (found.job, found.restarts, found.counts) == (JOB, 3, {"n0": 1, "n1": 2})
    assert recognize({"n0": rank(most="0")}) is None, "it restarts nothing"
    assert recognize({"n0": rank(slurm_job="7")}) is None, "Slurm owns the job"
    assert recognize({"n0": rank(kubernetes_job="a/train")}) is None
    assert recognize({"n0": rank(), "n1": rank(torchrun_run="other")}) is None
    assert recognize({"n0": rank(most="many")}) is None
    assert recognize({"n0": {}}) is None


def test_a_job_whose_processes_are_not_known_was_not_ended_by_a_signal(
    world: TorchrunWorld,
) -> None:
    request = request_of(world)
    with world.database.write() as session:
        session.execute(update(AttachmentRow).values(agent_id="another"))
    assert TorchrunLauncher(world.database).observe(request).state == "begun"


def test_a_launch_is_before_another_if_a_node_has_counted_or_left(world: TorchrunWorld) -> None:
    launch = world.launch()
    later = replace(launch, counts={"n0": 0, "n1": 1})
    assert launch.is_before(later)
    assert not later.is_before(launch)
    assert not launch.is_before(launch)
    assert launch.is_before(replace(launch, counts={"n0": 0}))
    assert not replace(launch, counts={"n0": 0}).is_before(launch)


def test_the_ranks_of_each_node_are_ended_once(world: TorchrunWorld) -> None:
    request, launcher = request_of(world), TorchrunLauncher(world.database)
    ready = launcher.observe(request)
    assert ready.state == "ready"
    for _ in range(3):  # a process that was paused, and its successor
        launcher.begin(request, ready)
        TorchrunLauncher(world.database).begin(request, ready)
    assert [(one.started_ns, one.leave) for one in world.commands()] == [
        ({0: 1}, False),
        ({1: 2}, False),
    ]
    seen = launcher.observe(request)
    assert (seen.state, "0 of 2 ranks" in seen.detail) == ("begun", True)
    world.play()
    assert launcher.observe(request).state == "done"
    launcher.begin(request, ready)
    assert (len(world.commands()), world.ended) == (2, [1, 2])


def test_a_command_of_an_earlier_generation_ends_nothing(world: TorchrunWorld) -> None:
    request, launcher = request_of(world), TorchrunLauncher(world.database)
    launcher.begin(request, launcher.observe(request))
    late = world.commands()[0]
    world.generation += 1  # torchrun restarts by itself before the agents are reached
    world.start()
    world.carry_out("n0", late)
    world.carry_out("n0", replace(late, generation=1))
    assert world.ended == []
    assert launcher.observe(request).state == "done"
    check = replace(request, kind="check")
    assert launcher.observe(check).state == "refused"


def test_used_up_restarts_are_the_reason_and_nothing_is_sent(requests: CommittedRequests) -> None:
    world = TorchrunWorld(requests, max_restarts=1)
    world.generation = 1
    world.start()
    request, launcher = request_of(world), TorchrunLauncher(world.database)
    seen = launcher.observe(request)
    assert (seen.state, seen.detail) == (
        "refused",
        "torchrun's --max-restarts=1 is used up on n0, n1: it would end the job instead of "
        "restarting it. Nothing was done.",
    )
    launcher.begin(request, seen)
    launcher.begin(request, replace(seen, state="ready"))
    assert world.commands() == []


def test_a_job_that_trains_is_not_restarted_with_the_store_of_its_old_ranks(
    world: TorchrunWorld,
) -> None:
    world.shares_store = True
    world.generation += 1
    world.start()
    request, launcher = request_of(world), TorchrunLauncher(world.database)
    check = replace(request, kind="check", is_training=True)
    seen = launcher.observe(check)
    assert seen.state == "refused"
    assert "start torchrun with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in seen.detail
    assert launcher.observe(replace(check, is_training=False)).state == "ready", "they hang"


@pytest.mark.parametrize(
    ("least", "exclude", "refusal"),
    [
        (None, "n1", "was started without --nnodes=LEAST:MOST: it cannot leave out n1"),
        ("2", "n1", "needs 2 nodes"),
        ("1", "n0", "meet at that of rank 0"),
        ("1", "n1", None),
    ],
)
def test_a_node_is_left_out_where_the_rendezvous_allows(
    requests: CommittedRequests, least: str | None, exclude: str, refusal: str | None
) -> None:
    world = TorchrunWorld(requests, least_nodes=least)
    request, launcher = request_of(world, exclude), TorchrunLauncher(world.database)
    seen = launcher.observe(request)
    launcher.begin(request, seen)
    if refusal is None:
        assert seen.state == "ready"
        assert [one.leave for one in world.commands()] == [False, True]
        world.play()
        assert world.left == ["n1"]
    else:
        assert (seen.state, refusal in seen.detail) == ("refused", True), seen
        assert world.commands() == []


def test_a_torchrun_that_has_given_up_is_not_waited_for_forever(world: TorchrunWorld) -> None:
    now = [0.0]
    request = request_of(world)
    launcher = TorchrunLauncher(world.database, clock=lambda: now[0])
    with world.database.write() as session:
        session.query(RankRow).update({"state": "exited"})
    assert launcher.observe(request).state == "begun"
    now[0] = 121.0
    seen = launcher.observe(request)
    assert (seen.state, "has given up" in seen.detail) == ("refused", True)


@pytest.mark.parametrize(
    ("least", "ended", "refused"),
    [
        pytest.param("1", [1], None, id="the other node can continue alone"),
        pytest.param("2", [1], "ended on n1, too", id="both are needed"),
        pytest.param("1", [0, 1], "ended on n0, n1, too", id="all"),
    ],
)
def test_a_torchrun_that_has_ended_too_is_not_waited_for(
    requests: CommittedRequests, least: str, ended: list[int], refused: str | None
) -> None:
    """Such as by `pkill -9 -f train.py`, which is also in torchrun's command line."""
    world = TorchrunWorld(requests, least_nodes=least)
    request, launcher = request_of(world), TorchrunLauncher(world.database)
    for state in ("exited", "attached"):
        with world.database.write() as session:
            session.query(RankRow).update({"state": state})
            gone = session.query(RankRow).where(RankRow.rank.in_(ended))
            gone.update({"launcher_gone": True, "state": "exited"})
        seen = launcher.observe(request)
        if refused is None:
            assert seen.state == ("begun" if state == "exited" else "ready")
        else:
            assert (seen.state, refused in seen.detail) == ("refused", True), seen


def test_torchruns_that_were_asked_to_end_start_nothing_again(world: TorchrunWorld) -> None:
    request, launcher = request_of(world), TorchrunLauncher(world.database)
    with world.database.write() as session:
        session.query(RankRow).update({"state": "exited"})
        session.query(RankRow).where(RankRow.rank == 1).update({"launcher_signal": 15})
    assert launcher.observe(request).state == "begun", "the torchrun of n0 still runs"
    with world.database.write() as session:
        session.query(RankRow).update({"launcher_signal": 15})
    seen = launcher.observe(request)
    assert (seen.state, seen.detail) == ("over", "torchrun received SIGTERM, which ended the job.")


def test_agents_that_cannot_end_their_ranks_are_the_reason(world: TorchrunWorld) -> None:
    request, launcher = request_of(world), TorchrunLauncher(world.database)
    launcher.begin(request, launcher.observe(request))
    world.processes = {0: 98, 1: 99}  # none of those that the commands name
    with world.database.read() as session:
        agents = {row.rank: row.agent_id for row in session.query(RankRow)}
    for command in world.commands():
        (rank,) = command.started_ns
        world.carry_out(agents[rank], command)
    seen = launcher.observe(request)
    assert (seen.state, "No agent could end its ranks" in seen.detail) == ("refused", True)


def carry_out(
    world: TorchrunWorld, kill_at: Path, number: int, moments: list[str], wait_for: Any
) -> int:
    """Have one request carried out while the process is killed; return the number of kills."""
    requests, action_id = world.requests, f"act-{number:08}"
    generation, pending, kills = world.generation, list(moments), 0
    requests.request(action_id, world.launch(), [], generation)
    armed = False

    def advance() -> bool:
        nonlocal armed, kills
        if armed and not kill_at.exists():
            kills, armed = kills + 1, False
        if not armed and pending:
            armed = True
            kill_at.write_text(pending.pop(0))
        requests.ensure_process()
        if not armed or not pending:  # the agents are away for most of the moments
            world.play()
        return requests.result(action_id).state != "waiting"

    wait_for(advance, "the restart", seconds=900.0)
    kill_at.unlink(missing_ok=True)
    assert requests.result(action_id).state == "done", requests.result(action_id)
    assert world.generation == generation + 1, "lost or twice"
    assert len(world.ended) == 2 * (generation + 1), "each rank was ended once"
    assert len(world.commands()) == 2 * (generation + 1)
    return kills


def test_a_killed_process_leaves_nothing_undone_or_twice(
    world: TorchrunWorld, kill_at: Path, wait_for: Callable[..., Any]
) -> None:
    """The quick version: a kill once the commands are written, before and after their commit."""
    moments = ["after INSERT INTO commands", "committed INSERT INTO commands"]
    assert carry_out(world, kill_at, 0, moments, wait_for) == len(moments)


@pytest.mark.campaign
@pytest.mark.timeout(3000)
def test_each_request_is_carried_out_once_whenever_the_process_is_killed(
    world: TorchrunWorld,
    kill_at: Path,
    wait_for: Callable[..., Any],
    capsys: pytest.CaptureFixture[str],
) -> None:
    kills = number = 0
    while kills < KILLS:
        kills += carry_out(world, kill_at, number, MOMENTS, wait_for)
        number += 1
    with capsys.disabled():
        print(f"\nkilled {kills} times in {number} requests: none lost, none carried out twice")
