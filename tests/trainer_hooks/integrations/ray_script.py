"""A script of Ray Train in the shape of its PyTorch example; it does not know Paceline.

ray_script.py DIRECTORY
"""

from __future__ import annotations

import sys
import time
from typing import Any

import ray
import torch
from ray import train
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer, prepare_data_loader, prepare_model
from torch.utils.data import DataLoader, TensorDataset


def train_func(config: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    data = TensorDataset(torch.randn(64, 8), torch.randn(64, 1))
    loader = prepare_data_loader(DataLoader(data, batch_size=4))
    model = prepare_model(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for epoch in range(config["epochs"]):
        for inputs, targets in loader:
            loss = torch.nn.functional.mse_loss(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            time.sleep(0.005)
        train.report({"loss": loss.item(), "epoch": epoch})


if __name__ == "__main__":
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=True)
    trainer = TorchTrainer(
        train_func,
        train_loop_config={"epochs": 1},
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(name="example", storage_path=sys.argv[1]),
    )
    print(trainer.fit().metrics)
    ray.shutdown()
