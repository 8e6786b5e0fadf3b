"""A script of Accelerate, after its example `gradient_accumulation.py`, without Paceline."""

import sys
from pathlib import Path

from accelerate import Accelerator  # isort: skip - nothing imports torch before

import torch
from torch.utils.data import DataLoader, TensorDataset


def train(output, epochs, resume):
    accelerator = Accelerator(gradient_accumulation_steps=3, cpu=True)
    accelerator.init_trackers("example")
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    rows = TensorDataset(torch.randn(48, 8), torch.randn(48, 1))
    model, optimizer, loader = accelerator.prepare(
        model, optimizer, DataLoader(rows, batch_size=2, shuffle=True)
    )
    if resume:
        accelerator.load_state(output / "state")
    for _ in range(epochs):
        model.train()
        for inputs, targets in loader:
            with accelerator.accumulate(model):
                loss = torch.nn.functional.mse_loss(model(inputs), targets)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                accelerator.log({"train_loss": loss.item()})
        accelerator.save_state(output / "state")
    return accelerator


if __name__ == "__main__":
    train(Path(sys.argv[1]), 2, resume=False)
    train(Path(sys.argv[1]), 1, resume=True).end_training()
