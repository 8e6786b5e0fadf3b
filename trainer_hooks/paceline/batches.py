"""Counts the samples and tokens of a step from the shapes of its batches."""

from __future__ import annotations

from typing import Any

# Keys that usually hold token ids, in the order in which they are tried.
TOKEN_KEYS = ("input_ids", "tokens", "inputs", "input")
MOST_FAILURES = 8  # batches without a shape, after which nothing is counted
_DEEPEST = 3  # nested dictionaries and lists
_WIDEST = 16  # entries of each
_CHANNELS = (1, 3, 4)  # channels of an image
# Attributes with the number of samples: of graphs in a batch of torch_geometric, and of graphs of
# DGL or of the seed nodes of a sampled graph of torch_geometric.
_SAMPLE_COUNTS = ("_num_graphs", "batch_size")


class BatchCounter:
    """The samples and tokens of the open step.

    Samples: the first dimension of the first tensor of a batch. Tokens: its elements, padding
    included, if it has two dimensions and integers of at least two bytes; a nested tensor has no
    padding. Images of several sizes, which a batch of a detector holds in a list, are one sample
    each. A batch of graphs has their number. Only shapes and numbers of the host are read, so no
    device is accessed. What the script counts itself replaces this.
    """

    __slots__ = ("_failures", "_has_tokens", "_is_given", "_path", "samples", "source", "tokens")

    def __init__(self) -> None:
        self.samples = 0
        self.tokens = 0
        self.source: str | None = None  # how it is counted
        self._path: tuple[Any, ...] | None = None  # keys of the counted tensor
        self._has_tokens = False
        self._is_given = False
        self._failures = 0

    def add(self, batch: Any) -> None:
        """Add a batch that was fetched for the open step. Never raises."""
        if self._is_given or self._failures >= MOST_FAILURES:
            return
        try:
            samples, tokens = self._count(batch)
        except Exception:
            self._failures += 1  # in a row
            return
        self._failures = 0
        self.samples += samples
        self.tokens += tokens

    def give(self, samples: int | None, tokens: int | None) -> None:
        """Add what the script counted in the open step."""
        if not self._is_given:
            self.clear()
            self._is_given = True
            self.source = "counted by the script"
        self.samples += samples or 0
        self.tokens += tokens or 0

    def clear(self) -> None:
        """Begin another step."""
        self.samples = self.tokens = 0

    def _count(self, batch: Any) -> tuple[int, int]:
        """Return samples and tokens. Raises an error if the batch has no tensor with a shape."""
        if self._path is not None:
            try:
                return self._count_at(self._path, batch)
            except Exception:
                self._path = None  # the batch has another structure than the one before
        path = self._path = self._learn(batch)
        return self._count_at(path, batch)

    def _count_at(self, path: tuple[Any, ...], batch: Any) -> tuple[int, int]:
        for key in path:
            batch = batch[key]
        if isinstance(batch, list | tuple):
            if not _is_image(batch[0]):  # the others were checked in the batch that it learned from
                raise LookupError("no images")
            return len(batch), 0
        if (samples := _samples_of(batch)) is not None:
            return samples, 0
        if _is_nested(batch):
            return batch.size(0), batch.values().numel() if self._has_tokens else 0
        shape = batch.shape
        return shape[0], shape[0] * shape[1] if self._has_tokens else 0

    def _learn(self, batch: Any) -> tuple[Any, ...]:
        """Find the counted tensor. Raises LookupError if the batch has no tensor with a shape."""
        path, tensor = _find(batch, 0)
        if isinstance(tensor, list | tuple):
            self._has_tokens, self.source = False, "samples from the images of each batch"
            return path
        if _samples_of(tensor) is not None:
            self._has_tokens, self.source = False, "samples that each batch reports"
            return path
        self._has_tokens = _is_tokens(tensor)
        name = f'"{path[-1]}"' if path and isinstance(path[-1], str) else "first tensor"
        what = "samples and tokens" if self._has_tokens else "samples"
        self.source = f"{what} from the {name} of each batch"[:100]
        return path


def _find(value: Any, depth: int) -> tuple[tuple[Any, ...], Any]:
    """Return the keys of the counted tensor or list of images, and the tensor or list."""
    if _has_shape(value) or _samples_of(value) is not None:
        return (), value
    if _are_images(value) and _differ(value):
        return (), value
    if depth < _DEEPEST:
        for key in _keys(value):
            if _are_images(value[key]) and _has_another(value, value[key]):
                return (key,), value[key]
            try:
                path, tensor = _find(value[key], depth + 1)
            except LookupError:
                continue
            return (key, *path), tensor
    raise LookupError("no tensor with a dimension")


def _keys(value: Any) -> list[Any]:
    if hasattr(value, "keys"):
        keys = list(value.keys())[:_WIDEST]
        return [key for key in TOKEN_KEYS if key in value] + keys
    return list(range(min(len(value), _WIDEST))) if isinstance(value, list | tuple) else []


def _has_shape(value: Any) -> bool:
    return _is_nested(value) or (bool(getattr(value, "shape", None)) and not hasattr(value, "keys"))


def _samples_of(value: Any) -> int | None:
    """Return how many samples a batch says that it has, such as one of graphs."""
    counts = (getattr(value, name, None) for name in _SAMPLE_COUNTS)
    return next((count for count in counts if type(count) is int), None)


def _is_nested(value: Any) -> bool:
    """Return whether this is a nested tensor, which has no shape or one with unknown numbers."""
    return bool(getattr(value, "is_nested", False))


def _are_images(value: Any) -> bool:
    """Return whether this is a list of images, or of dictionaries with one each."""
    if not isinstance(value, list | tuple) or not value:
        return False
    return all(map(_is_image, value))


def _is_image(value: Any) -> bool:
    image: Any = value.get("image") if isinstance(value, dict) else value
    if _is_nested(image) or not _has_shape(image):
        return False
    return len(image.shape) == 3 and image.shape[0] in _CHANNELS


def _differ(images: Any) -> bool:
    """Return whether it is sure that each is a sample: in a dictionary, or of another width.

    Batches of sequences have their number of features there, which is the same for all.
    """
    return isinstance(images[0], dict) or len({image.shape[2] for image in images}) > 1


def _has_another(batch: Any, images: Any) -> bool:
    """Return whether the batch has another list of as many, such as the boxes in each image."""
    others = (batch[key] for key in _keys(batch))
    return any(
        isinstance(other, list | tuple) and other is not images and len(other) == len(images)
        for other in others
    )


def _is_tokens(tensor: Any) -> bool:
    """Return whether a tensor or array holds token ids: two dimensions, integers, no bytes."""
    if (tensor.dim() if _is_nested(tensor) else len(tensor.shape)) != 2:
        return False
    if hasattr(tensor, "is_floating_point"):
        is_number = tensor.is_floating_point() or tensor.is_complex()
        return not is_number and tensor.element_size() > 1
    return tensor.dtype.kind in "iu" and tensor.dtype.itemsize > 1
