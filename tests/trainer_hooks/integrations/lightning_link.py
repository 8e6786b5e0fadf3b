"""A Trainer of one process whose last checkpoint is a link, and a request for a checkpoint."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader

import paceline
from paceline.integrations import lightning as adapter

tempfile.tempdir = "/dev/shm"  # another file system, as that of checkpoints usually is
directory = sys.argv[1]
batches: list[int] = []  # that were trained on


class Model(lightning.LightningModule):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 1)

    def training_step(self, batch: Tensor, index: int) -> Any:
        batches.append(index)
        return self.layer(batch).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


adapter.should_checkpoint = lambda step=None: step == 3
paceline.init()


def train(steps: int, ckpt_path: str | None = None) -> None:
    own = ModelCheckpoint(directory, save_last="link", every_n_train_steps=2, save_top_k=-1)
    trainer = lightning.Trainer(
        accelerator="cpu",
        max_steps=steps,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[own, adapter.LightningCallback()],
    )
    trainer.fit(Model(), DataLoader(torch.ones(8, 8)), ckpt_path=ckpt_path)  # type: ignore[arg-type]


train(3)
saved = {path: torch.load(path, weights_only=False) for path in Path(directory).iterdir()}
assert {path.name: content["global_step"] for path, content in saved.items()} == {
    "epoch=0-step=2.ckpt": 2,
    "last.ckpt": 2,
    "last-requested.ckpt": 3,
}
batches.clear()
train(4, "last")
assert len(batches) == 1, "resumed after step 3"
