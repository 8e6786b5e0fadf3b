"""A training of two ranks by a framework, which follows requests by its own means.

    python requested_framework.py FRAMEWORK DIRECTORY [STEPS]

With STEPS it resumes, and trains to that step. It prints the number of completed steps at its end.
Where the loop is the script's, the script gives `paceline.steps` the call that saves.
"""

from __future__ import annotations

import importlib
import os
import runpy
import sys
from pathlib import Path
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


def newest_step() -> int:
    """Return the step of the newest checkpoint that the script has named `step-N`."""
    return max(int(path.name.removeprefix("step-")) for path in Path(directory).glob("step-*"))


def accelerate() -> int:
    accelerate = importlib.import_module("accelerate")
    importlib.import_module("paceline.integrations.accelerate")
    paceline.init()
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)  # which counts no steps
    model, optimizer, loader = accelerator.prepare(
        model, optimizer, DataLoader(Rows(), batch_size=2)
    )
    step = newest_step() if resumes else 0
    if resumes:
        accelerator.load_state(f"{directory}/step-{step}")

    def save(step: int) -> None:
        accelerator.save_state(f"{directory}/step-{step}")

    for batch in paceline.steps(loader, start=step, save=save):
        with accelerator.accumulate(model):
            accelerator.backward(model(batch).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        step += accelerator.sync_gradients
        if step == steps:
            break
    return step


def fabric() -> int:
    lightning = importlib.import_module("lightning.fabric")
    adapter = importlib.import_module("paceline.integrations.fabric")
    paceline.init()
    callbacks = [adapter.FabricCallback()]
    own = lightning.Fabric(accelerator="cpu", devices=2, strategy="ddp", callbacks=callbacks)
    own.launch()
    model = nn.Linear(8, 1)
    model, optimizer = own.setup(model, torch.optim.AdamW(model.parameters()))
    loader = own.setup_dataloaders(DataLoader(Rows(), batch_size=2))
    state = {"model": model, "optimizer": optimizer, "step": newest_step() if resumes else 0}
    if resumes:
        own.load(f"{directory}/step-{state['step']}", state)

    def save(step: int) -> None:
        own.save(f"{directory}/step-{step}", state)

    for batch in paceline.steps(loader, start=state["step"], save=save):
        own.backward(model(batch).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        state["step"] += 1
        if state["step"] == steps:
            break
    return int(state["step"])


def deepspeed() -> int:
    os.environ["DS_ACCELERATOR"] = "cpu"
    deepspeed = importlib.import_module("deepspeed")
    importlib.import_module("paceline.integrations.deepspeed")
    deepspeed.init_distributed(dist_backend="gloo")
    paceline.init()
    model = nn.Linear(8, 1)
    engine, _, loader, _ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters()),
        training_data=Rows(),
        config={
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": 2,
            "zero_optimization": {"stage": 1},
            "zero_allow_untested_optimizer": True,
        },
    )
    if resumes:
        engine.load_checkpoint(directory)
    for batch in paceline.steps(loader, save=lambda _: engine.save_checkpoint(directory)):
        engine.backward(engine(batch).square().mean())
        engine.step()
        if engine.global_steps == steps:
            break
    return int(engine.global_steps)


INTEGRATIONS = Path(__file__).parents[1] / "integrations"


def megatron() -> int:
    """Train with two stages, and act on requests in the loop."""
    sys.path.insert(0, str(INTEGRATIONS))
    training = importlib.import_module("megatron_ranks")
    adapter = importlib.import_module("paceline.integrations.megatron")
    for name in ("pipeline_parallel.schedules", "dist_checkpointing"):
        adapter.attach(importlib.import_module(f"megatron.core.{name}"))
    with training.OnCpu():
        model, optimizer, run = training.prepare(pipeline_size=2)
        paceline.init()
        for step in range(1, steps):
            training.train(model, optimizer, run)
            if paceline.should_checkpoint():
                training.save(model, Path(directory) / f"step-{step}")
            if paceline.should_stop():
                return step
    raise AssertionError("it was never asked to stop")


def torchtitan() -> int:
    own = "torchtitan.observability.structured_logger.jsonl_handler.register_jsonl_handler"
    handlers = f"{own},paceline.integrations.torchtitan.register"
    os.environ["TITAN_STRUCT_LOGGER_HANDLERS"] = handlers
    options = {
        "training.steps": steps,
        "training.seq_len": 64,
        "training.local_batch_size": 2,
        "training.mixed_precision_param": "float32",
        "checkpoint.interval": steps,
        "checkpoint.async_mode": "async",
        "dump_folder": directory,
    }
    arguments = (str(part) for name, value in options.items() for part in (f"--{name}", value))
    sys.argv = ["torchtitan", f"{directory}/assets", "--checkpoint.enable", *arguments]
    runpy.run_path(str(INTEGRATIONS / "torchtitan_on_cpu.py"), run_name="__main__")
    saved = Path(directory, "checkpoint").glob("step-*/.metadata")
    return max(int(file.parent.name.removeprefix("step-")) for file in saved)


if __name__ == "__main__":
    os.environ["LOCAL_RANK"] = os.environ["RANK"]
    trainings = (hugging_face, lightning, accelerate, fabric, deepspeed, megatron, torchtitan)
    print("ended after", {each.__name__: each for each in trainings}[framework]())
