"""The training data: the sources of Python's standard library, as bytes.

Files are divided into training and validation by a hash of their name. The training bytes are cut
into sequences. Sample N of a run (N = step x global batch size + position in the global batch) is
entry N of an endless series of seeded permutations. The dp size determines which rank reads a
sample, but not the samples of a step: a run resumed at any step and any dp size neither repeats nor
skips a sample.

With a `sequence_spread` of 3, each sequence has a length between a third of the full length and the
full length; the rest is padding, which does not count in the loss.
"""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from paceline_trainer.errors import TrainerSettingsError
from paceline_trainer.faults import Faults
from paceline_trainer.settings import RankPlacement, TrainerSettings

VALIDATION_SHARE = 10  # one of this many files is for validation


class TokenBatch(NamedTuple):
    """The data of one dp rank in one step."""

    tokens: Tensor  # (microbatches, microbatch size, length + 1), padded
    lengths: Tensor  # (microbatches, microbatch size), without padding


class Sequences:
    """Consecutive sequences of `length` + 1 bytes (inputs and targets overlap).

    `lengths` is the number of bytes of each before the padding, log-uniform, so most are short.
    """

    def __init__(self, text: bytes | bytearray, length: int, spread: float = 1.0) -> None:
        self.length = length
        self.count = (len(text) - 1) // length
        self._bytes = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        parts = torch.rand(self.count, generator=torch.Generator().manual_seed(length))
        self.lengths = (length * spread**-parts).round().clamp(min=1).to(torch.int64)

    def __getitem__(self, index: int) -> Tensor:
        start = index * self.length
        return self._bytes[start : start + self.length + 1]


def read_corpus(settings: TrainerSettings) -> tuple[Sequences, Sequences]:
    """Return training and validation sequences. Raises TrainerSettingsError for too little text."""
    directory = settings.data_directory or Path(sysconfig.get_path("stdlib"))
    train, validation = bytearray(), bytearray()
    for path in sorted(directory.glob("*.py")):
        digest = hashlib.sha256(path.name.encode()).digest()
        (train if digest[0] % VALIDATION_SHARE else validation).extend(path.read_bytes())
    length = settings.model.sequence_length
    if min(len(train), len(validation)) <= length:
        raise TrainerSettingsError(
            f"{directory} has too little Python source for training and validation; give "
            "another --data-directory"
        )
    return Sequences(train, length, settings.sequence_spread), Sequences(validation, length)


class SampleOrder:
    """The sequence of each sample: a pure function of the seed and the sample's number."""

    def __init__(self, count: int, seed: int) -> None:
        self.count = count
        self.seed = seed
        self._epoch: int | None = None
        self._permutation: list[int] = []

    def __getitem__(self, number: int) -> int:
        epoch, position = divmod(number, self.count)
        if epoch != self._epoch:
            generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
            self._permutation = torch.randperm(self.count, generator=generator).tolist()
            self._epoch = epoch
        return self._permutation[position]


class Loader:
    """The batches of one dp rank, from step `start`."""

    def __init__(
        self,
        sequences: Sequences,
        settings: TrainerSettings,
        place: RankPlacement,
        start: int = 0,
        faults: Faults | None = None,
    ) -> None:
        self.sequences = sequences
        self.order = SampleOrder(sequences.count, settings.seed)
        self.settings = settings
        self.place = place
        self.start = start
        self.faults = faults or Faults()
        self.microbatches = settings.microbatches(place.topology)

    def __iter__(self) -> Iterator[TokenBatch]:
        for step in range(self.start, self.settings.steps):
            self.faults.before_batch()
            yield self.batch(step)

    def numbers(self, step: int) -> range:
        """Return the sample numbers that this dp rank reads at `step`."""
        share = self.microbatches * self.settings.microbatch_size
        first = step * self.settings.global_batch_size + self.place.coordinates.dp_rank * share
        return range(first, first + share)

    def batch(self, step: int) -> TokenBatch:
        chosen = [self.order[number] for number in self.numbers(step)]
        return _batch(self.sequences, chosen, self.microbatches)


def validation_batch(
    sequences: Sequences, settings: TrainerSettings, place: RankPlacement
) -> TokenBatch:
    """Return the held-out sequences: always the same, spread over the text, divided over dp
    ranks."""
    share = settings.evaluation_microbatches * settings.microbatch_size
    total = share * place.topology.dp
    first = place.coordinates.dp_rank * share
    chosen = [
        number * sequences.count // total % sequences.count
        for number in range(first, first + share)
    ]
    return _batch(sequences, chosen, settings.evaluation_microbatches)


def _batch(sequences: Sequences, chosen: list[int], microbatches: int) -> TokenBatch:
    tokens = torch.stack([sequences[index] for index in chosen]).to(torch.int64)
    lengths = sequences.lengths[chosen]
    return TokenBatch(
        tokens.view(microbatches, -1, sequences.length + 1), lengths.view(microbatches, -1)
    )
