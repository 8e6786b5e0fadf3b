"""A training of two ranks by a framework, which follows requests by its own means.

    python requested_framework.py FRAMEWORK DIRECTORY [STEPS]

With STEPS it resumes, and trains to that step. It prints the number of completed steps at its end.
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import paceline

framework, directory = sys.argv[1:3]
resumes = len(sys.argv) > 3
steps = int(sys.argv[3]) if resumes else 100_000
torch.set_num_threads(1)


class Rows(Dataset[Any]):
    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, index: int) -> Any:
        row = torch.full((8,), index / 1e6)
        return {"x": row} if framework == "hugging_face" else row


def hugging_face() -> int:
    transformers = importlib.import_module("transformers")
    adapter = importlib.import_module("paceline.integrations.hugging_face")

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 1)

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return {"loss": self.layer(x).square().mean()}

    arguments = transformers.TrainingArguments(
        output_dir=directory,
        per_device_train_batch_size=2,
        max_steps=steps,
        save_strategy="no",
        logging_strategy="no",
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = transformers.Trainer(
        model=Model(),
        args=arguments,
        train_dataset=Rows(),
        callbacks=[adapter.PacelineCallback()],
    )
    paceline.init()
    trainer.train(resume_from_checkpoint=resumes)
    return int(trainer.state.global_step)


def lightning() -> int:
    lightning = importlib.import_module("lightning")

    class Model(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 1)

        def training_step(self, batch: Tensor, index: int) -> Any:
            return self.layer(batch).square().mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters())

    paceline.init()
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        max_steps=steps,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[lightning.pytorch.callbacks.ModelCheckpoint(directory, save_last=True)],
        default_root_dir=directory,
    )
    trainer.fit(Model(), DataLoader(Rows(), batch_size=2), ckpt_path="last" if resumes else None)
    return int(trainer.global_step)


if __name__ == "__main__":
    os.environ["LOCAL_RANK"] = os.environ["RANK"]
    print("ended after", {"hugging_face": hugging_face, "lightning": lightning}[framework]())
