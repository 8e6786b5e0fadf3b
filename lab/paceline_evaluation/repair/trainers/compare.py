"""Compare two checkpoints, value by value.

    python compare.py ONE OTHER

prints a JSON object: the number of values, the names of those that differ, and the largest
difference between two tensors, relative to the largest value of the tensor.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch


def main(one: Path, other: Path) -> None:
    left, right = _flat(_load(one)), _flat(_load(other))
    different, largest = sorted(left.keys() ^ right.keys()), 0.0
    for name in left.keys() & right.keys():
        a, b = left[name], right[name]
        if not isinstance(a, torch.Tensor):
            different += [name] * (a != b)
        elif a.shape != b.shape or a.dtype != b.dtype:
            different.append(name)
        elif not torch.equal(a, b):
            different.append(name)
            scale = max(float(a.double().abs().max()), 1e-30)
            largest = max(largest, float((a.double() - b.double()).abs().max()) / scale)
    print(json.dumps({"values": len(left), "different": different, "largest": largest}))


def _load(path: Path) -> Any:
    if (path / ".metadata").exists():
        from torch.distributed.checkpoint.format_utils import dcp_to_torch_save  # noqa: PLC0415

        with tempfile.NamedTemporaryFile() as file:
            dcp_to_torch_save(path, file.name)
            return torch.load(file.name, weights_only=False)
    from safetensors.torch import load_file  # noqa: PLC0415

    return {
        "model": load_file(path / "model.safetensors"),
        "optimizer": torch.load(path / "optimizer.pt", weights_only=True),
    }


def _flat(value: Any, name: str = "") -> dict[str, Any]:
    if isinstance(value, dict):
        items = [(str(key), part) for key, part in value.items()]
    elif isinstance(value, list | tuple):
        items = [(str(number), part) for number, part in enumerate(value)]
    else:
        return {name: value}
    return {k: v for key, part in items for k, v in _flat(part, f"{name}.{key}").items()}


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
