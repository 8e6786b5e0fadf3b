"""Reports to `Recognition` what torch does in the training thread.

Optimizer hooks are torch's own. A few functions that a step calls once or twice are replaced; they
stay so for the life of the process and pass calls on without a session. Module hooks and full
backward hooks would cost more than the budget of a step.
"""

from __future__ import annotations

import io
import sys
import weakref
from _thread import get_ident
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial, wraps
from typing import Any, NamedTuple

from paceline.memory import MemoryMeter
from paceline.recognition import Recognition
from paceline.recorder import Recorder
from paceline.saves import Save, Saves, completed_steps
from paceline.sections import StatusSection
from paceline.uncompiled import leave_uncompiled
from paceline_wire.spans import MemoryKind

Function = Callable[..., Any]

# Functions that save, and the names of their first two arguments: what, and where to.
_STATE_DICT_SAVERS = {
    "save": ("state_dict", "checkpoint_id"),
    "async_save": ("state_dict", "checkpoint_id"),
    "save_state_dict": ("state_dict", "storage_writer"),
}
CHECKPOINT_MODULES = (
    ("torch.distributed.checkpoint", _STATE_DICT_SAVERS),
    ("torch.distributed.checkpoint.state_dict_saver", _STATE_DICT_SAVERS),
    (
        "safetensors.torch",
        {"save_file": ("tensors", "filename"), "save_model": ("model", "filename")},
    ),
)


class CheckpointSections(NamedTuple):
    """Timers of checkpoints: the script's, and one for those that an adapter reports itself."""

    of_script: StatusSection
    of_framework: StatusSection


class TorchEvents:
    """The hooks of this process; they report to `recognition` if it is set."""

    _instance: TorchEvents | None = None

    @classmethod
    def get(cls) -> TorchEvents:
        """Return those of this process, installed at the first call. Torch must be loaded."""
        if cls._instance is None:
            cls._instance = cls(sys.modules["torch"])
        return cls._instance

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        self.recognition: Recognition | None = None
        self.recorder: Recorder | None = None
        self.checkpoints: CheckpointSections | None = None
        self.saves: Saves | None = None
        self._is_saving = False
        self.memory: MemoryMeter | None = None  # in steps whose memory is measured
        self._owner = 0
        self._seen_modules: set[str] = set()
        self._replacements: dict[Function, Function] = {}
        self.known_modules = 0  # number of loaded modules when they were searched
        self._stepped = 0  # optimizer steps, of any thread
        self._watches_optimizers = False
        # Torch marks the `step` of each class of which an optimizer was created.
        steps = (vars(each).get("step") for each in subclasses(torch.optim.Optimizer))
        self._has_optimizer = any(getattr(step, "hooked", False) for step in steps)
        self._had_optimizer = self._has_optimizer  # then `_optimizers` are not all
        self._optimizers: weakref.WeakSet[Any] = weakref.WeakSet()
        self._trained: weakref.WeakSet[Any] = weakref.WeakSet()  # that have begun a step
        self._latest = 0  # id of the one that began the newest step
        self.new_parameters = 0  # numbers in the parameters of those that began their first step
        # Those that trained before this recording.
        self._earlier: weakref.WeakSet[Any] = weakref.WeakSet()
        _replace(torch.optim.Optimizer, "_patch_step_function", self._create_optimizer)
        _replace(torch.amp.GradScaler, "step", self._scaler_step)
        _replace(torch.autograd, "backward", self._backward)
        if hasattr(torch.autograd, "_engine_run_backward"):
            _replace(torch.autograd, "_engine_run_backward", self._gradients)
        _replace(torch.utils.data.dataloader._BaseDataLoaderIter, "__next__", self._fetch)
        _replace(torch.nn.Module, "eval", self._eval)
        self._train = torch.nn.Module.train
        self._replace_shared(torch, "save", self._save)
        self._replace_shared(torch.serialization, "save", self._save)

    def start(
        self,
        recognition: Recognition,
        recorder: Recorder,
        checkpoints: CheckpointSections,
        saves: Saves,
    ) -> None:
        """Report to `recognition` and `saves`, what the owner thread of `recorder` does."""
        self.recognition, self.recorder = recognition, recorder
        self.checkpoints, self.saves = checkpoints, saves
        self._owner = recorder.owner
        self.new_parameters = 0
        self.watch_modules()

    def stop(self) -> None:
        """Pass all calls on from now on."""
        self._owner = 0
        self.recognition = self.recorder = self.memory = None
        self.checkpoints = self.saves = None
        self._earlier.update(self._optimizers)

    def has_optimizer(self) -> bool:
        """Return whether an optimizer of torch was ever created in this process."""
        return self._has_optimizer

    def has_one_optimizer(self) -> bool:
        """Return whether this process is known to have exactly one optimizer of torch."""
        return not self._had_optimizer and len(self._optimizers) == 1

    def completed_steps(self) -> int:
        """Return how many steps the optimizers of this training had made when they were loaded."""
        return completed_steps(self._optimizers - self._earlier)

    def watch_modules(self) -> None:
        """Replace the functions of modules that save checkpoints, once each is loaded.

        Those of Paceline itself are left uncompiled.
        """
        self.known_modules = len(sys.modules)
        with suppress(AttributeError):  # this torch has no such setting
            leave_uncompiled(self._torch)
        for name, functions in CHECKPOINT_MODULES:
            module = sys.modules.get(name)
            if module is None or name in self._seen_modules:
                continue
            self._seen_modules.add(name)
            for function, (what, where) in functions.items():
                if hasattr(module, function):
                    make = partial(self._save_files, what, where)
                    self._replace_shared(module, function, make)

    def _replace_shared(self, module: Any, name: str, make: Callable[[Function], Function]) -> None:
        """Replace a function that several modules have by one and the same: pickle compares it with
        that of the module that defines it, as for a process that saves in the background."""
        original = getattr(module, name)
        if original not in self._replacements:
            self._replacements[original] = make(original)
        setattr(module, name, self._replacements[original])

    def _report(self, event: Function, *args: Any, **kwargs: Any) -> Any:
        """Report an event; count an error of Paceline instead of raising it in the training."""
        try:
            return event(*args, **kwargs)
        except Exception:
            self._failed()
            return None

    def _failed(self) -> None:
        if self.recorder is not None:
            self.recorder.failures += 1

    # Optimizers

    def _create_optimizer(self, original: Function) -> Function:
        @wraps(original)
        def patch_step_function(optimizer: Any) -> None:
            self._has_optimizer = True
            self._latest = 0  # it may have the id of one that is gone
            if not self._remember(optimizer):
                self._had_optimizer = True
            original(optimizer)

        return patch_step_function

    def _remember(self, optimizer: Any) -> bool:
        """Add it to the known optimizers. Return False if its class cannot be hashed."""
        try:
            self._optimizers.add(optimizer)
        except TypeError:
            return False
        return True

    def watch_optimizers(self) -> None:
        """Register the hooks, once; not in the constructor, which an optimizer hook may call."""
        if self._watches_optimizers:
            return
        optimizers: Any = sys.modules["torch.optim.optimizer"]
        optimizers.register_optimizer_step_pre_hook(self._optimizer_begins())
        optimizers.register_optimizer_step_post_hook(self._optimizer_ends())
        self._watches_optimizers = True

    def _optimizer_begins(self) -> Function:
        def begins(optimizer: Any, *_: Any) -> None:
            self._stepped += 1
            if self._had_optimizer:
                self._remember(optimizer)
            recognition = self.recognition
            if recognition is None:
                with suppress(TypeError):  # it cannot be hashed
                    self._earlier.add(optimizer)
                return
            if get_ident() == self._owner:
                if id(optimizer) != self._latest:
                    self._report(self._begins_step, optimizer)
                if self.memory is not None:
                    self._report(self.memory.optimizer_begins, optimizer)
                try:
                    recognition.optimizer_begins(id(optimizer))
                except Exception:
                    self._failed()
            elif self._torch._C._current_graph_task_id() != -1:
                recognition.optimizer_in_backward()

        return _not_compiled(begins)

    def _begins_step(self, optimizer: Any) -> None:
        """Count the parameters of an optimizer that begins its first step."""
        self._latest = id(optimizer)
        with suppress(TypeError):  # it cannot be hashed
            if optimizer not in self._trained:
                self._trained.add(optimizer)
                groups = optimizer.param_groups
                self.new_parameters += sum(
                    one.numel() for group in groups for one in group["params"]
                )

    def _optimizer_ends(self) -> Function:
        def ends(optimizer: Any, *_: Any) -> None:
            recognition = self.recognition
            if recognition is not None and get_ident() == self._owner:
                if self.memory is not None:
                    self._report(self.memory.optimizer_ends, optimizer)
                try:
                    recognition.optimizer_ends(id(optimizer))
                except Exception:
                    self._failed()

        return _not_compiled(ends)

    def _scaler_step(self, original: Function) -> Function:
        @wraps(original)
        def step(scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            stepped = self._stepped
            result = original(scaler, optimizer, *args, **kwargs)
            recognition = self.recognition
            if recognition is not None and stepped == self._stepped and get_ident() == self._owner:
                self._report(recognition.optimizer_skipped, id(optimizer))
            return result

        return step

    # Backward

    def _backward(self, original: Function) -> Function:
        @wraps(original)
        def backward(*args: Any, **kwargs: Any) -> Any:
            recognition = self.recognition
            if recognition is None or get_ident() != self._owner:
                return original(*args, **kwargs)
            if not self._watches_optimizers:
                self._report(self.watch_optimizers)
            if self.memory is not None:
                self._report(self.memory.phase_ends, MemoryKind.AFTER_FORWARD)
            try:
                recognition.backward_begins(args[0] if args else kwargs.get("tensors"))
            except Exception:
                self._failed()
            try:
                return original(*args, **kwargs)
            finally:
                try:
                    recognition.backward_ends()
                except Exception:
                    self._failed()
                if self.memory is not None:
                    self._report(self.memory.phase_ends, MemoryKind.AFTER_BACKWARD)

        return _disabled(backward)

    def _gradients(self, original: Function) -> Function:
        """Report a pass of `autograd.grad`, which calls the engine as `backward` does."""
        modes = getattr(self._torch._C, "_len_torch_dispatch_stack", int)

        @wraps(original)
        def run(outputs: Any, *args: Any, **kwargs: Any) -> Any:
            recognition = self.recognition
            ignored = recognition is None or kwargs.get("accumulate_grad") or modes()
            if ignored or recognition is None or get_ident() != self._owner:
                return original(outputs, *args, **kwargs)
            if not self._watches_optimizers:
                self._report(self.watch_optimizers)
            inputs = args[3] if len(args) > 3 else ()
            begun = self._report(recognition.gradients_begin, outputs, inputs)
            try:
                return original(outputs, *args, **kwargs)
            finally:
                if begun is not False:  # or it failed
                    self._report(recognition.backward_ends)

        return run

    def optimized_parameters(self) -> Iterator[Any]:
        """Yield the parameters of all known optimizers."""
        for optimizer in list(self._optimizers):
            for group in optimizer.param_groups:
                yield from group["params"]

    # Data

    def _fetch(self, original: Function) -> Function:
        is_grad_enabled = self._torch.is_grad_enabled

        @wraps(original)
        def fetch(iterator: Any) -> Any:
            recognition = self.recognition
            if recognition is None or get_ident() != self._owner:
                return original(iterator)
            loader = id(getattr(iterator, "_index_sampler", iterator))
            recorded = bool(
                self._report(recognition.fetch_begins, loader, has_gradients=is_grad_enabled())
            )
            try:
                batch = original(iterator)
            except BaseException:
                self._report(recognition.loader_ends, recorded=recorded)
                raise
            self._report(recognition.fetch_ends, batch, recorded=recorded)
            return batch

        return fetch

    # Evaluation

    def _eval(self, original: Function) -> Function:
        @wraps(original)
        def evaluate(module: Any) -> Any:
            result = original(module)
            recognition = self.recognition
            if recognition is None or get_ident() != self._owner:
                return result
            if self._report(recognition.evaluation_mode, module):
                self._watch_train()
            return result

        return _compiled_as(original, evaluate)

    def _watch_train(self) -> None:
        """Replace `Module.train`, which calls itself for each submodule, while it matters."""
        module_class = self._torch.nn.Module
        original = module_class.train

        @wraps(original)
        def train(module: Any, mode: bool = True) -> Any:
            recognition = self.recognition
            if mode and recognition is not None and get_ident() == self._owner:
                ended = self._report(recognition.training_mode, module)
                if ended is not False and module_class.train is train:
                    module_class.train = original
            return original(module, mode)

        module_class.train = _compiled_as(original, train)

    # Checkpoints

    def _save(self, original: Function) -> Function:
        @wraps(original)
        def save(obj: Any, f: Any, *args: Any, **kwargs: Any) -> Any:
            if isinstance(f, io.BytesIO):
                return original(obj, f, *args, **kwargs)
            return self._saving(lambda: original(obj, f, *args, **kwargs), Save(obj, f))

        return save

    def _save_files(self, what: str, where: str, original: Function) -> Function:
        @wraps(original)
        def save(*args: Any, **kwargs: Any) -> Any:
            contents = args[0] if args else kwargs.get(what)
            place = kwargs.get(where)
            if place is None:
                writer = kwargs.get("storage_writer")
                place = args[1] if len(args) > 1 else getattr(writer, "path", None)
            of_dcp = what == "state_dict"
            return self._saving(lambda: original(*args, **kwargs), Save(contents, place, of_dcp))

        return save

    def _saving(self, run: Callable[[], Any], save: Save) -> Any:
        """Time a save, unless something else does, and report it, unless it is part of another."""
        checkpoints, saves = self.checkpoints, self.saves
        if checkpoints is None or saves is None or get_ident() != self._owner or self._is_saving:
            return run()
        if checkpoints.of_framework.start:
            return run()
        section = None if checkpoints.of_script.start else checkpoints.of_script
        overwritten = self._report(saves.overwritten, save)
        self._is_saving = True
        if section is not None:
            self._report(section.__enter__)
        try:
            result = run()
        except BaseException as error:
            self._report(saves.failed, save, overwritten, self._optimizers, error)
            raise
        finally:
            self._is_saving = False
            if section is not None and section.start:
                self._report(section.__exit__, None, None, None)
        self._report(saves.saved, save, overwritten, self._optimizers, result)
        return result


def _replace(owner: Any, name: str, replacement: Callable[[Function], Function]) -> None:
    setattr(owner, name, replacement(getattr(owner, name)))


def _not_compiled(hook: Function) -> Function:
    """Have torch.compile leave the hook out of compiled optimizers."""
    return _compiled_as(_nothing, hook)


def _compiled_as(original: Function, replacement: Function) -> Function:
    """Have torch.compile trace the original where a compiled function calls the replacement."""
    replacement._torchdynamo_inline = original  # type: ignore[attr-defined]
    return replacement


def _nothing(*_: Any) -> None:
    return None


def _disabled(function: Function) -> Function:
    """Have torch.compile call the function instead of tracing it, as it does with the original."""
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    return function


def subclasses(base: type[Any]) -> Iterator[type[Any]]:
    """Yield all subclasses of a class, at any depth."""
    each: type[Any]
    for each in base.__subclasses__():
        yield each
        yield from subclasses(each)
