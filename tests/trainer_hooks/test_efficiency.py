"""Samples, tokens, memory and FLOPs of a step, as the agent reads them."""

from __future__ import annotations

import sys
import types
from contextlib import closing
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
from torch.utils.flop_counter import FlopCounterMode

import paceline
from paceline.batches import MOST_FAILURES, BatchCounter
from paceline.flops import FlopCount
from paceline.memory import MemoryMeter
from paceline.recorder import Recorder
from paceline_wire.ring import RingReader
from paceline_wire.spans import MemoryKind, Op, Span, unpack

IDS = torch.zeros(4, 16, dtype=torch.int64)
IMAGES = [torch.ones(3, 8, 8 + size) for size in range(5)]


class Graphs(dict[str, torch.Tensor]):
    """A batch of graphs, whose tensors have a row for each node, as one of torch_geometric."""

    def __init__(self, **attributes: int) -> None:
        super().__init__(x=torch.ones(99, 8), edge_index=torch.ones(2, 400))
        vars(self).update(attributes)


class Texts(Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"attention_mask": torch.ones(16), "input_ids": IDS[0]}


def model() -> nn.Sequential:
    return nn.Sequential(nn.Embedding(100, 8), nn.Linear(8, 32), nn.Linear(32, 100))


def values(spans: list[Span], op: Op) -> list[tuple[int, int]]:
    return [(span.sequence, span.bytes) for span in spans if span.op == op]


@pytest.mark.parametrize(
    ("batch", "samples", "tokens"),
    [
        ({"mask": torch.ones(4, 16), "input_ids": IDS}, 4, 64),
        (IDS, 4, 64),
        ((IDS, IDS), 4, 64),
        ([(torch.ones(3, 8, 8), torch.zeros(3, dtype=torch.int64))], 3, 0),
        ({"text": ["a", "b"], "pixels": torch.ones(2, 3, 8, 8)}, 2, 0),
        (torch.zeros(4, 16, dtype=torch.uint8), 4, 0),
        (np.zeros((2, 8), np.int32), 2, 16),
        ((IMAGES, [{"boxes": torch.ones(n, 4)} for n in range(5)]), 5, 0),
        ((tuple(IMAGES), tuple([1, 2] for _ in IMAGES)), 5, 0),
        ({"inputs": IMAGES[:1], "data_samples": [object()]}, 1, 0),
        (IMAGES, 5, 0),
        ([{"image": image, "height": 8} for image in IMAGES], 5, 0),
        ([torch.ones(3, 8, 8), torch.ones(3, 8, 8)], 3, 0),
        ((torch.ones(4, 10, 32), torch.ones(4, 12, 32)), 4, 0),
        ((torch.nested.nested_tensor([IDS[0], IDS[1, :5]], layout=torch.jagged),), 2, 21),
        (Graphs(_num_graphs=3), 3, 0),
        ((Graphs(batch_size=7), torch.ones(7)), 7, 0),
        ("text", 0, 0),
        (None, 0, 0),
    ],
)
def test_samples_and_tokens_come_from_the_shapes_of_a_batch(
    batch: Any, samples: int, tokens: int
) -> None:
    counter = BatchCounter()
    counter.add(batch)
    assert (counter.samples, counter.tokens) == (samples, tokens)
    counter.add(batch)
    assert (counter.samples, counter.tokens) == (2 * samples, 2 * tokens)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_nested_tensor_without_a_shape_is_counted() -> None:
    counter = BatchCounter()
    counter.add({"x": torch.nested.nested_tensor([IDS[0, :3], IDS[0, :5]])})
    assert (counter.samples, counter.tokens) == (2, 8)


def test_batches_of_an_evaluation_do_not_count(reader: RingReader) -> None:
    network = model()
    optimizer = torch.optim.SGD(network.parameters())
    training, held_out = (DataLoader(Texts(), batch_size=size) for size in (4, 8))
    for _ in range(2):
        for batch in training:
            network(batch["input_ids"]).sum().backward()
            optimizer.step()
        with torch.no_grad():
            for batch in held_out:
                network(batch["input_ids"])
    paceline.finish()
    spans = list(unpack(reader.read()))
    assert [span for span in spans if span.op == Op.EVALUATE]
    steps = [span.sequence for span in spans if span.op == Op.STEP]
    assert steps[1:] == [4] * 19


def test_batches_without_a_shape_are_given_up() -> None:
    counter = BatchCounter()
    for _ in range(MOST_FAILURES):
        counter.add("text")
    counter.add(IDS)
    assert counter.samples == 0


def test_batches_of_several_structures_are_all_counted() -> None:
    counter = BatchCounter()
    for _ in range(2 * MOST_FAILURES):
        for batch in ({"input_ids": IDS}, (IDS, IDS), "text"):
            counter.add(batch)
    assert counter.samples == 4 * MOST_FAILURES * len(IDS)


def test_a_loop_is_counted_and_measured_without_a_changed_line(reader: RingReader) -> None:
    network = model()
    optimizer = torch.optim.AdamW(network.parameters())
    for _ in range(2):  # the first loop's first batch comes before the first step
        for batch in DataLoader(Texts(), batch_size=4):
            optimizer.zero_grad()
            network(batch["input_ids"]).sum().backward()
            optimizer.step()
    paceline.finish()
    spans = list(unpack(reader.read()))
    steps = [(span.sequence, span.bytes) for span in spans if span.op == Op.STEP]
    assert steps[1:] == [(4, 64)] * 19
    size = sum(4 * each.numel() for each in network.parameters())
    # AdamW has two moments per parameter, and a step counter of four bytes per tensor.
    state = 2 * size + 4 * len(list(network.parameters()))
    measured = [
        (MemoryKind.PARAMETERS, size),
        (MemoryKind.GRADIENTS, size),
        (MemoryKind.OPTIMIZER, state),
    ]
    assert values(spans, Op.MEMORY) == measured * 2  # in steps 2 and 7
    described = {k: v for each in reader.new_descriptions() for k, v in each.metadata.items()}
    assert described["counted_from"] == 'samples and tokens from the "input_ids" of each batch'


def test_the_script_counts_instead(reader: RingReader) -> None:
    for _ in range(4):
        with paceline.step():
            paceline.count(samples=2, tokens=11)
            paceline.count(tokens=9)
    paceline.count(samples=-1)
    paceline.finish()
    spans = unpack(reader.read())
    assert [(each.sequence, each.bytes) for each in spans if each.op == Op.STEP] == [(2, 20)] * 4


def test_the_flops_of_one_step_are_those_of_torch_s_counter(
    monkeypatch: pytest.MonkeyPatch, ring_directory: Any
) -> None:
    monkeypatch.setenv("PACELINE_COUNT_FLOPS", "1")
    monkeypatch.setenv("PACELINE_PEAK_FLOPS", "1e12")
    network = model()
    with FlopCounterMode(display=False) as counter:
        network(IDS).sum().backward()
    paceline.init()
    paceline.describe_model(flops_per_token=1000)
    reader = RingReader(ring_directory / "local.g0.r0.ring")
    optimizer = torch.optim.SGD(network.parameters())
    for batch in DataLoader(Texts(), batch_size=4):
        network(batch["input_ids"]).sum().backward()
        optimizer.step()
    paceline.finish()
    counted = values(list(unpack(reader.read())), Op.FLOPS)
    assert counted[0] == (0, counter.get_total_flops())
    described = {k: v for each in reader.new_descriptions() for k, v in each.metadata.items()}
    assert described["peak_flops"] == "1000000000000.0"
    assert described["flops_per_token"] == "1000.0"
    reader.close()


def test_a_mode_that_the_script_has_entered_meanwhile_stays() -> None:
    count = FlopCount()
    with FlopCounterMode(display=False) as own:
        assert count.end() is None
        torch.ones(2, 3) @ torch.ones(3, 4)
    assert own.get_total_flops() == 48
    assert count.end() == 0


def test_the_allocator_is_read_at_the_end_of_each_phase(
    monkeypatch: pytest.MonkeyPatch, ring: Recorder
) -> None:
    """There is no GPU here: the module has the functions of `torch.cuda` that are read."""
    numbers = {
        "allocated_bytes.all.current": 500,
        "allocated_bytes.all.peak": 900,
        "reserved_bytes.all.current": 1000,
        "inactive_split_bytes.all.current": 100,
    }
    rank = 1  # its device need not be the current one
    cuda = types.SimpleNamespace(
        is_initialized=lambda: True,
        device_count=lambda: 2,
        memory_allocated=lambda index: 500 if index == rank else 0,
        memory_stats=lambda index: numbers if index == rank else {},
    )
    monkeypatch.setitem(sys.modules, "torch.cuda", cuda)
    meter = MemoryMeter(ring)
    meter.phase_ends(MemoryKind.AFTER_FORWARD)
    numbers["allocated_bytes.all.current"] = 300
    meter.write()
    with closing(RingReader(ring.ring.path)) as reader:
        written = dict(values(list(unpack(reader.read())), Op.MEMORY))
    assert written == {
        MemoryKind.AFTER_FORWARD: 500,
        MemoryKind.ALLOCATED: 300,
        MemoryKind.PEAK: 900,
        MemoryKind.RESERVED: 1000,
        MemoryKind.INACTIVE: 100,
    }
