"""A script of DeepSpeed with two engines, of which the second steps half as often and later."""

import deepspeed
import torch


def engine_of(model):
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=0.01),
        config={
            "train_micro_batch_size_per_gpu": 2,
            "zero_optimization": {"stage": 1},
            "zero_allow_untested_optimizer": True,
        },
    )
    return engine


def train(engine, inputs):
    engine.backward(engine(inputs).square().mean())
    engine.step()


deepspeed.init_distributed(dist_backend="gloo")
torch.manual_seed(0)
frozen, actor, critic = (engine_of(torch.nn.Linear(8, 1)) for _ in range(3))
for step in range(8):
    batch = torch.randn(2, 8)
    with torch.no_grad():
        frozen(batch)
    train(actor, batch)
    if step % 2:
        train(critic, batch)
critic = engine_of(torch.nn.Linear(8, 1))  # the next training, while the actor is still there
for _ in range(3):
    train(critic, torch.randn(2, 8))
