"""A script of Composer, after its "getting started" page; it does not know Paceline."""

import sys

import torch
from composer import Trainer
from composer.models import ComposerModel
from composer.utils import dist
from torch.utils.data import DataLoader, TensorDataset


class Regression(ComposerModel):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 1)

    def forward(self, batch):
        return self.layer(batch[0])

    def loss(self, outputs, batch):
        return torch.nn.functional.mse_loss(outputs, batch[1])

    def eval_forward(self, batch, outputs=None):
        return self(batch) if outputs is None else outputs

    def update_metric(self, batch, outputs, metric):
        metric.update(outputs, batch[1])

    def get_metrics(self, is_train=False):
        return {}


def loader(rows):
    data = TensorDataset(torch.randn(rows, 8), torch.randn(rows, 1))
    return DataLoader(data, batch_size=4, sampler=dist.get_sampler(data, shuffle=True))


def train(output, batches, resume):
    trainer = Trainer(
        model=Regression(),
        train_dataloader=loader(40),
        eval_dataloader=loader(16),
        device="cpu",
        max_duration=f"{batches}ba",
        eval_interval="3ba",
        save_folder=output,
        save_interval="4ba",
        save_latest_filename="latest.pt",
        load_path=f"{output}/latest.pt" if resume else None,
        device_train_microbatch_size=2,
        progress_bar=False,
        save_overwrite=True,
    )
    trainer.fit()


if __name__ == "__main__":
    train(sys.argv[1], 4, resume=False)
    train(sys.argv[1], 8, resume=True)
