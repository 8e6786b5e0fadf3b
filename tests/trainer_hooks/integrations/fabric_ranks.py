"""A script of Fabric, after the loop of its documentation; it does not know Paceline."""

import sys

import torch
from lightning.fabric import Fabric
from torch.utils.data import DataLoader, TensorDataset


def train(output, epochs, resume):
    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
    fabric.launch()
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 1)
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters()))
    rows = TensorDataset(torch.randn(24, 8), torch.randn(24, 1))
    loader = fabric.setup_dataloaders(DataLoader(rows, batch_size=2, shuffle=True))
    state = {"model": model, "optimizer": optimizer}
    if resume:
        fabric.load(f"{output}/state", state)
    for _ in range(epochs):
        for number, (inputs, targets) in enumerate(loader):
            is_accumulating = number % 2 == 0
            with fabric.no_backward_sync(model, enabled=is_accumulating):
                fabric.backward(torch.nn.functional.mse_loss(model(inputs), targets))
            if not is_accumulating:
                optimizer.step()
                optimizer.zero_grad()
        fabric.save(f"{output}/state", state)


if __name__ == "__main__":
    train(sys.argv[1], 2, resume=False)
    train(sys.argv[1], 1, resume=True)
