"""A script of Lightning, after its "boring model" example; it does not know Paceline.

Each rank writes the rows that it trained on to its file.
"""

import os
import signal
import sys

import lightning
import torch
from torch.utils.data import DataLoader, Dataset


class Rows(Dataset):
    def __init__(self, size):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        return index, torch.full((8,), float(index))


class Regression(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 1)
        self.rows = []

    def training_step(self, batch, batch_index):
        index, values = batch
        self.rows += index.tolist()
        return self.layer(values / 64).square().mean()

    def on_train_batch_end(self, outputs, batch, batch_index):
        if os.environ.get("TERMINATED_RANK") == os.environ["RANK"] and batch_index == 5:
            os.kill(os.getpid(), signal.SIGTERM)

    def validation_step(self, batch, batch_index):
        self.log("loss", self.layer(batch[1] / 64).square().mean(), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


def train(output, max_steps, resume):
    checkpoints = lightning.pytorch.callbacks.ModelCheckpoint(
        output, every_n_train_steps=4, save_top_k=-1, save_last=True
    )
    trainer = lightning.Trainer(
        accelerator="cpu",
        # Lightning's handler of SIGTERM broadcasts in the midst of other collectives.
        devices=1 if "TERMINATED_RANK" in os.environ else 2,
        strategy="auto" if "TERMINATED_RANK" in os.environ else "ddp",
        max_steps=max_steps,
        accumulate_grad_batches=2,
        val_check_interval=6,
        limit_val_batches=2,
        callbacks=[checkpoints],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=output,
    )
    model = Regression()
    trainer.fit(
        model,
        DataLoader(Rows(64), batch_size=2, shuffle=True),
        DataLoader(Rows(16), batch_size=2),
        ckpt_path=f"{output}/last.ckpt" if resume else None,
    )
    return model.rows


def write(output, rows):
    with open(f"{output}/rows.{os.environ['RANK']}", "w") as file:
        file.write(" ".join(map(str, rows)))


if __name__ == "__main__":
    write(sys.argv[1], train(sys.argv[1], 4, resume=False))
    train(sys.argv[1], 8, resume=True)
