"""The result of `paceline.steps` keeps what frameworks look for in a loader."""

from __future__ import annotations

from pathlib import Path

from torch.utils.data import DataLoader

import paceline
from paceline_wire.ring import RingReader
from paceline_wire.spans import Op, unpack
from tests.trainer_hooks.conftest import Script

DATA_LOADER = """
import copy, inspect, pickle
import torch, paceline
from torch.utils.data import DataLoader, DistributedSampler

class Loader(DataLoader):
    def __iter__(self):
        for batch in super().__iter__():
            yield batch + 1

paceline.init()
plain = Loader(range(8), batch_size=2)
wrapped = paceline.steps(plain, start=5)
assert isinstance(wrapped, Loader) and type(wrapped).__name__ == "Loader"
for name in ("dataset", "sampler", "batch_sampler", "collate_fn", "num_workers"):
    assert getattr(wrapped, name) is getattr(plain, name), name
assert len(wrapped) == 4
wrapped.mine = 3
assert wrapped.mine == 3
assert inspect.signature(type(wrapped)) == inspect.signature(Loader)
# As Lightning does: the same class again, with a sampler of its own.
sampler = DistributedSampler(wrapped.dataset, num_replicas=2, rank=0, shuffle=False)
again = type(wrapped)(wrapped.dataset, batch_size=2, sampler=sampler)
again.sampler.set_epoch(1)
print([batch.tolist() for batch in again])
print([batch.tolist() for batch in copy.copy(wrapped)][0])
print(len(list(pickle.loads(pickle.dumps(wrapped)))))
"""


def test_a_data_loader_stays_one_that_can_be_created_again(script: Script, tmp_path: Path) -> None:
    finished = script(DATA_LOADER)
    assert finished.stdout == "[[1, 3], [5, 7]]\n[1, 2]\n4\n", finished.stderr
    spans = unpack(RingReader(tmp_path / "local.g0.r0.ring").read())
    assert [span.step for span in spans if span.op == Op.STEP] == list(range(5, 15))


def test_attributes_are_set_on_the_loader() -> None:
    class Loader(list[int]):
        epoch = 0

    loader = Loader([1])
    wrapped = paceline.steps(loader)
    wrapped.epoch = 4
    assert loader.epoch == wrapped.epoch == 4
    del wrapped.epoch
    assert loader.epoch == 0


PERSISTENT_WORKERS = """
import torch, paceline
from torch.utils.data import DataLoader, Dataset, get_worker_info

class Data(Dataset):
    def __len__(self):
        return 2

    def __getitem__(self, index):
        return get_worker_info().seed

loader = DataLoader(Data(), num_workers=1, persistent_workers=True)
seeds = {seed.item() for epoch in range(2) for seed in paceline.steps(loader)}
print(len(seeds))
"""


def test_persistent_workers_of_a_loader_that_each_epoch_wraps_again_stay(script: Script) -> None:
    finished = script(PERSISTENT_WORKERS)
    assert finished.stdout == "1\n", finished.stderr


def test_a_data_loader_whose_class_has_no_other_subclass_is_wrapped() -> None:
    class Loader(DataLoader[int]):
        def __init_subclass__(cls, *, name: str) -> None:
            raise AssertionError("not called without a name")

    wrapped = paceline.steps(Loader([1, 2, 3], batch_size=2))  # type: ignore[arg-type]
    assert len(wrapped) == len(list(wrapped)) == 2


EVALUATION = """
import os, torch, paceline
from pathlib import Path
from torch.utils.data import DataLoader, TensorDataset
from paceline_wire.ring import RingReader

paceline.init()
page = RingReader(Path(os.environ["PACELINE_RING_DIRECTORY"], "local.g0.r0.ring"))
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
batches = lambda count: DataLoader(TensorDataset(torch.randn(count, 4)))

def evaluate():
    seen = []
    with torch.no_grad():
        for (batch,) in batches(8):
            model(batch)
            view = page.view()
            seen.append((view.head, view.step, view.microbatch))
    print(len(set(seen)))

evaluate()
for _ in range(2):
    for (batch,) in batches(5):
        model(batch).sum().backward()
        optimizer.step()
    evaluate()
"""


def test_each_batch_of_an_evaluation_changes_the_state_page(script: Script) -> None:
    """Otherwise ranks seem to be hung during a long one."""
    finished = script(EVALUATION)
    assert finished.stdout == "8\n8\n8\n", finished.stderr
