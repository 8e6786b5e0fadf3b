"""Replicas of one parameter are compared; the one that differs is named."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from paceline.checkpoints import replicas
from paceline.checkpoints.replicas import Piece, ReplicaCheck, ReplicaSet, checksum
from tests import forked_python
from tests.forked_python import ForkedPython
from tests.ports import free_port

RUN = Path(__file__).with_name("replicated_run.py")


def run(directory: Path, world: int, outlier: int) -> list[dict[str, Any]]:
    """Train with `world` ranks, one of which flips a bit; return what rank 0 reports."""
    port = free_port()
    ranks = [
        ForkedPython([RUN, rank, world, port, directory, outlier, 40], os.environ)
        for rank in range(world)
    ]
    outputs = [rank.communicate(timeout=170)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0] * world
    return [json.loads(line) for line in outputs[0].splitlines() if line.startswith("{")]


def test_of_three_ranks_the_one_with_a_flipped_bit_is_named(tmp_path: Path) -> None:
    [found] = run(tmp_path, 3, outlier=1)
    assert (found["outliers"], found["ranks"]) == ([1], [0, 1, 2])
    assert found["tensor"] == "0.module.weight"
    assert 41 <= found["step"] <= 120
    assert found["agreed_step"] is None or found["agreed_step"] <= 40


@pytest.mark.campaign
def test_of_two_ranks_one_differs_and_without_a_flip_none(tmp_path: Path) -> None:
    [found] = run(tmp_path / "flip", 2, outlier=1)
    assert (found["outliers"], found["ranks"]) == ([], [0, 1])
    assert run(tmp_path / "healthy", 2, outlier=-1) == []


class SharedStore:
    """A store in memory, with the methods that are used."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.reads = 0

    def set(self, key: str, value: str) -> None:
        self.values[key] = value.encode()

    def multi_get(self, keys: list[str]) -> list[bytes]:
        self.reads += 1
        return [self.values[key] for key in keys]

    def check(self, keys: list[str]) -> bool:
        self.reads += 1
        return all(key in self.values for key in keys)


def pieces(parameter: torch.Tensor, size: int = 64) -> list[Piece]:
    total = parameter.numel() * parameter.element_size()
    return [
        Piece("weight", parameter, begin, min(begin + size, total))
        for begin in range(0, total, size)
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.uint8])
def test_any_flipped_bit_changes_the_checksum(dtype: torch.dtype) -> None:
    tensor = torch.arange(13).to(dtype)
    piece = Piece("x", tensor, 0, tensor.numel() * tensor.element_size())
    content, before = tensor.view(torch.uint8), int(checksum(piece, {}))
    for place in range(len(content)):
        for bit in range(8):
            content[place] ^= 1 << bit
            assert int(checksum(piece, {})) != before
            content[place] ^= 1 << bit
    assert int(checksum(piece, {})) == before


def test_all_pieces_are_checked_in_time() -> None:
    one = ReplicaSet((0, 1), pieces(torch.zeros(16 * 20)))
    for every in (8, 64, 1024):
        checked = {one.piece(every * number) for number in range(400)}
        assert checked == set(range(20)), every


def checks(models: list[nn.Linear], **options: Any) -> list[ReplicaCheck]:
    store: Any = SharedStore()
    ranks = tuple(range(len(models)))
    sets = [[ReplicaSet(ranks, pieces(model.weight))] for model in models]
    return [
        ReplicaCheck(own, rank, store, least_every=1, **options) for rank, own in enumerate(sets)
    ]


def wait_until(condition: Any, seconds: float = 20.0) -> bool:
    waited = threading.Event()
    for _ in range(int(seconds / 0.05)):
        if condition():
            return True
        waited.wait(0.05)
    return False


def same(count: int) -> list[nn.Linear]:
    models = []
    for _ in range(count):
        torch.manual_seed(0)
        models.append(nn.Linear(4, 4))
    return models


@pytest.mark.parametrize(("count", "expected"), [(3, [2]), (2, [])])
def test_the_majority_names_the_outlier_and_of_two_none(count: int, expected: list[int]) -> None:
    models = same(count)
    started = checks(models, overhead=1e9)
    for step in range(1, 12):
        for one in started:
            one.step_ended(step)
        if step == 2:
            models[-1].weight.data.view(torch.int32)[0, 0] ^= 1
    assert wait_until(lambda: not started[0].mismatches.empty())
    assert started[0].mismatches.get().outliers == expected
    for one in started:
        one.close()


def test_ranks_of_which_groups_differ_are_no_replicas() -> None:
    models = same(4)
    started = checks(models, overhead=1e9)
    for step in range(1, 12):
        for one in started:
            one.step_ended(step)
        if step == 2:  # local SGD begins: two groups of two
            for model in models[2:]:
                model.weight.data.add_(1.0)
    assert wait_until(lambda: started[0]._off == {0})
    assert started[0].mismatches.empty()
    for one in started:
        one.close()


@pytest.mark.parametrize("damaged", [True, False])
def test_two_ranks_of_which_all_pieces_differ_train_alone(damaged: bool) -> None:
    models = [nn.Linear(4, 16) for _ in range(2)]  # four pieces each
    models[1].load_state_dict(models[0].state_dict())
    started = checks(models, overhead=1e9)
    for step in range(1, 40):
        for one in started:
            one.step_ended(step)
        if not damaged and step >= 7:  # averaged at each third step
            models[1].weight.data.add_(1.0 if step % 3 else -2.0)
        elif damaged and step == 7:
            models[1].weight.data[0, 0] += 1.0
    assert wait_until(lambda: started[0]._off == {0})
    assert started[0].mismatches.qsize() == damaged
    for one in started:
        one.close()


def test_a_rank_compares_each_of_its_sets_with_the_same_set_of_others() -> None:
    store: Any = SharedStore()
    model = same(1)[0]
    pairs = [[(0, 1), (0, 2)], [(0, 1)], [(0, 2), (2, 3)]]
    started = [
        ReplicaCheck(
            [ReplicaSet(pair, pieces(model.weight)) for pair in own],
            *(rank, store),
            least_every=1,
            overhead=1e9,
        )
        for rank, own in enumerate(pairs)
    ]
    for one in started:
        one.step_ended(1)
    assert wait_until(lambda: {number for number, _ in started[0]._agreed} == {0, 1})
    for one in started:
        one.close()


def test_steps_that_another_rank_does_not_check_are_not_waited_for() -> None:
    started = checks(same(2), overhead=1e9)
    store: Any = started[0]._store
    for step in range(1, 41):
        started[0].step_ended(step)
        if step % 4 == 0:
            started[1].step_ended(step)
    assert wait_until(lambda: 40 in started[0]._agreed.values())
    reads = store.reads
    threading.Event().wait(3 * replicas._POLL_SECONDS)
    assert store.reads == reads, "nothing is left to compare"
    for one in started:
        one.close()


IGNORED = """
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.testing._internal.distributed.fake_pg import FakeStore
from paceline.checkpoints.replicas import replica_sets

dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
module = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
DDP._set_params_and_buffers_to_ignore_for_model(module, ["1.weight"])
[found] = replica_sets([DDP(module)])
print(found.ranks, [piece.name for piece in found.pieces])
"""


def test_parameters_that_ddp_ignores_are_not_compared() -> None:
    ended = forked_python.run(["-c", IGNORED], os.environ, timeout=60)
    assert ended.stdout == (
        "(0, 1, 2, 3) ['0.module.0.weight', '0.module.0.bias', '0.module.1.bias']\n"
    ), ended.stderr


def test_ranks_that_never_had_the_same_content_are_no_replicas() -> None:
    started = checks([nn.Linear(4, 4), nn.Linear(4, 4)], overhead=1e9)
    for step in range(1, 9):
        for one in started:
            one.step_ended(step)
    assert wait_until(lambda: started[0]._off == {0})
    assert started[0].mismatches.empty()
    for one in started:
        one.close()


def test_the_interval_follows_the_cost() -> None:
    now = 0.0

    def clock() -> float:
        nonlocal now
        now += 0.001  # each reading: a checksum takes 1 ms
        return now

    [check] = checks(same(1), clock=clock)
    for step in range(1, 400):
        now += 0.1
        check.step_ended(step)
    assert check.every == 32, "1 ms in 32 steps of 0.1 s is at most half of 0.1%"
    check.close()


def test_the_checksum_is_awaited_on_its_own_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    class OnGpu:
        is_cuda, device = True, torch.device("cuda", 3)

    class Target:
        def copy_(self, value: OnGpu, *, non_blocking: bool) -> Target:
            return self

    awaited: list[torch.device] = []
    monkeypatch.setattr(replicas, "checksum", lambda piece, weights: OnGpu())
    monkeypatch.setattr(replicas, "DeviceMark", awaited.append)
    [check] = checks(same(1))
    check.close()
    monkeypatch.setattr(torch, "empty", lambda shape, **options: Target())
    check.step_ended(1)
    assert awaited == [OnGpu.device], "not on the current one, which may be another"
