"""An ordinary data-parallel script: it contains no line of Paceline."""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

VOCABULARY, LENGTH, WIDTH = 1024, 256, 512


def main(steps: int) -> None:
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    layer = nn.TransformerEncoderLayer(WIDTH, 8, 4 * WIDTH, dropout=0.0, batch_first=True)
    layers = nn.TransformerEncoder(layer, 8, enable_nested_tensor=False)
    embedding, head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
    model = nn.Sequential(embedding, layers, head).to(device, torch.bfloat16)
    model = nn.parallel.DistributedDataParallel(model, device_ids=[device.index])
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = torch.randint(0, VOCABULARY, (16 * steps, LENGTH))
    for (batch,) in DataLoader(TensorDataset(tokens), batch_size=16):
        inputs = batch.to(device, non_blocking=True)
        logits = model(inputs)
        loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), inputs[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    print("loss", loss.item(), flush=True)
    dist.destroy_process_group()


main(int(sys.argv[1]))
