"""Switch a model to an attention path for some passes, and restore the owner's state exactly."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from transformers import PreTrainedConfig, PreTrainedModel

from bass_core.interrupts import always
from bass_core.model import transformers_internals as internals
from bass_core.model.attention import registered_name

MISSING = object()
SWITCHED = (internals.ATTENTION, "pad_token_id")  # config entries that `Switch` changes
OWN = "_bass_own"  # entry of a switched config: the switching thread, and the owner's values

Change = tuple[dict, str, Any]  # a table, the name of an entry, and the new value


@contextmanager
def changed(changes: Sequence[Change]) -> Iterator[None]:
    """Set these entries inside the context and restore them afterwards, even after Ctrl-C during the restoration."""
    before = [(table, name, table.get(name, MISSING)) for table, name, _ in changes]

    def restore() -> None:
        for table, name, value in before:
            if value is MISSING:
                table.pop(name, None)
            else:
                table[name] = value

    with always(restore):
        for table, name, value in changes:
            table[name] = value
        yield


_switching = threading.RLock()  # held while a model is switched or restored


class InUse(RuntimeError):
    """The model is decoding in another thread."""


def path_of(model: PreTrainedModel) -> str | None:
    """Return the path to which this thread switched `model`, or None."""
    thread, path, _ = vars(model).get("_bass_path", (None, None, None))
    return path if thread == threading.get_ident() else None


def as_found(model: PreTrainedModel) -> AbstractContextManager[None]:
    """Restore the owner's configuration of a switched model inside the context; encoders need it."""
    return changed(vars(model).get("_bass_path", (None, None, ()))[2])


class Switch:
    """Switches `model` to an attention path and back. Modules added after construction keep their mode."""

    def __init__(
        self,
        model: PreTrainedModel,
        path: str,
        replaced: Sequence[Change],
        kept: Sequence[Change] = (),
        faster: Callable[[], Sequence[Change]] = tuple,
    ):
        """replaced: changes for a ragged cache (`architectures.replacements`). kept: changes for writing hidden states
        into this runner's cache. faster: returns changes for fewer operators."""
        self.model, self.path, self._modules = model, path, [vars(module) for module in model.modules()]
        self._configs = [vars(each) for each in configurations(model)]
        self._replaced, self._kept, self._faster = replaced, kept, faster

    @property
    def is_on(self) -> bool:
        """Return True if this switch, or another with the same path and the same cache for hidden states, is active."""
        kept = all(table.get(name) is value for table, name, value in self._kept)
        return kept and path_of(self.model) == self.path

    @contextmanager
    def on(self) -> Iterator[None]:
        """Run the model with the path in evaluation mode, and restore the owner's state.

        Raises InUse while another thread runs the model, or a model that shares a config object with it.
        """
        with ExitStack() as stack:
            with _switching:
                stack.enter_context(changed(self._changes()))
                stack.enter_context(evaluating(self._modules))
            try:
                yield
            finally:
                with _switching:
                    stack.close()

    def _changes(self) -> list[Change]:
        """Return the changes of `on`. Raises InUse."""
        paths, thread = self._configs, threading.get_ident()
        if any(config[OWN][0] != thread for config in paths if OWN in config):
            raise InUse(
                f"{type(self.model).__name__}, or a model that shares its config object, is decoding in another "
                "thread; give each thread its own models, or share one Session"
            )
        # A draft may share the config of a target that is already switched.
        own = [
            config[OWN][1] if OWN in config else {name: config[name] for name in SWITCHED if name in config}
            for config in paths
        ]
        found = [(config, *entry) for config, kept in zip(paths, own, strict=True) for entry in kept.items()]
        changes = [(vars(self.model), "_bass_path", (thread, self.path, found))]
        changes += [*self._replaced, *self._kept, *self._faster()]
        changes += [(config, internals.ATTENTION, registered_name(self.path)) for config in paths]
        changes += [(config, OWN, (thread, kept)) for config, kept in zip(paths, own, strict=True)]
        # With this id, GPT-2 checks every pass for padding, and the host waits for the check.
        return changes + [(paths[0], "pad_token_id", None)] * ("pad_token_id" in paths[0])


def evaluating(modules: Iterable[dict]) -> AbstractContextManager[None]:
    """Set evaluation mode for modules, given by their `vars`, and restore training mode afterwards."""
    return changed([(module, "training", False) for module in modules if module["training"]])


def configurations(model: PreTrainedModel) -> list[PreTrainedConfig]:
    """Return the configuration of the model, nested configurations, and the configurations of all modules.

    Parts of T5 have copies. A layer from another model keeps the other model's configuration.
    """
    found = [config for module in model.modules() if isinstance(config := vars(module).get("config"), PreTrainedConfig)]
    found.insert(0, model.config)
    for config in found:
        found += [sub for name in config.sub_configs if (sub := getattr(config, name, None)) is not None]
    return list({id(config): config for config in found}.values())


def is_plain(part: nn.Module | None) -> bool:
    """Return True for an unmodified `nn.Linear` with ordinary weights."""
    if type(part) is not nn.Linear or is_touched(part):
        return False
    if not part._parameters.keys() >= {"weight", "bias"} or written_in(nn.Linear.forward) != nn.modules.linear.__file__:
        return False
    tensors = [part.weight] if part.bias is None else [part.weight, part.bias]
    return all(
        each.is_contiguous()
        and each.device.type != "meta"
        and not each.is_inference()
        and not is_traceable_wrapper_subclass(each)
        for each in tensors
    )


def is_touched(module: nn.Module) -> bool:
    """Return True if a module has hooks or a replaced `forward`."""
    return bool("forward" in vars(module) or module._forward_hooks or module._forward_pre_hooks)


def written_in(function: object) -> str | None:
    """Return the file of a function's code, or None without Python code. For a wrapper, this is the wrapper's file."""
    return getattr(getattr(function, "__code__", None), "co_filename", None)
