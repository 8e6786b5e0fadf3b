"""A script of Lightning: a regression with DDP.

torchrun --nproc-per-node 4 lightning_ddp.py --batch 64
"""

from __future__ import annotations

import argparse
import os
import tempfile
from typing import Any

import lightning
import torch
from orders import Orders
from torch import nn
from torch.utils.data import DataLoader, Dataset

WIDTH = 384
orders = Orders()


class Rows(Dataset[torch.Tensor]):
    """Rows without end. Each is sorted, in place of parsing it."""

    def __init__(self, rows_per_step: int, size: int) -> None:
        self.rows_per_step, self.size = rows_per_step, size
        self.reads = 0

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> torch.Tensor:
        self.reads += 1
        if self.reads % self.rows_per_step == 0:
            orders.in_loader(self.reads // self.rows_per_step)
        chance = torch.Generator().manual_seed(index)
        return torch.randn(WIDTH, generator=chance).sort().values


class Regression(lightning.LightningModule):  # type: ignore[misc]
    """Has the ordered faults between its forward and its backward."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(16))
        )

    def training_step(self, batch: torch.Tensor, batch_index: int) -> torch.Tensor:
        loss = self.layers(batch).square().mean()
        orders.in_step(batch_index)
        return loss

    def validation_step(self, batch: torch.Tensor, batch_index: int) -> None:
        self.log("loss", self.layers(batch).square().mean(), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--evaluate-every", type=int, default=0)
    parser.add_argument("--checkpoint-every", type=int, default=0)
    given = parser.parse_args()
    torch.set_num_threads(1)
    options: dict[str, Any] = {"limit_val_batches": 0}
    if given.evaluate_every:
        options = {"limit_val_batches": 4, "val_check_interval": given.evaluate_every}
    with tempfile.TemporaryDirectory() as output:
        callbacks = []
        if given.checkpoint_every:
            callbacks.append(
                lightning.pytorch.callbacks.ModelCheckpoint(
                    output, every_n_train_steps=given.checkpoint_every
                )
            )
        trainer = lightning.Trainer(
            accelerator="cpu",
            devices=int(os.environ["LOCAL_WORLD_SIZE"]),
            num_nodes=int(os.environ["WORLD_SIZE"]) // int(os.environ["LOCAL_WORLD_SIZE"]),
            strategy="ddp",
            max_steps=1_000_000,
            callbacks=callbacks,
            enable_checkpointing=bool(callbacks),
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=output,
            **options,
        )
        batch = given.batch
        trainer.fit(
            Regression(),
            DataLoader(Rows(batch, 10_000_000), batch_size=batch, num_workers=given.workers),
            DataLoader(Rows(batch, 10_000), batch_size=batch),
        )


if __name__ == "__main__":
    main()
