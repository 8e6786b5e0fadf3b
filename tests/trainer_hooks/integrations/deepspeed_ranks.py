"""A script of DeepSpeed, after its getting-started loop; it does not know Paceline."""

import sys

import deepspeed
import torch
from torch.utils.data import TensorDataset


def train(output, epochs, resume):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
    engine, _, loader, _ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=0.01),
        training_data=TensorDataset(torch.randn(48, 8), torch.randn(48, 1)),
        config={
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": 3,
            "zero_optimization": {"stage": 1},
            "zero_allow_untested_optimizer": True,
        },
    )
    if resume:
        engine.load_checkpoint(output)
    for _ in range(epochs):
        for inputs, targets in loader:
            loss = torch.nn.functional.mse_loss(engine(inputs), targets)
            engine.backward(loss)
            engine.step()
        engine.save_checkpoint(output)


if __name__ == "__main__":
    deepspeed.init_distributed(dist_backend="gloo")
    train(sys.argv[1], 2, resume=False)
    train(sys.argv[1], 1, resume=True)
