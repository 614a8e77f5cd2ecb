"""A model switched to an attention path for some passes, and back, exactly as its owner left it."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from transformers import PreTrainedConfig, PreTrainedModel

from bass_core.interrupts import always
from bass_core.model import transformers_internals as internals
from bass_core.model.attention import registered_name

MISSING = object()
SWITCHED = (internals.ATTENTION, "pad_token_id")  # entries of configs that `Switch` changes
OWN = "_bass_own"  # entry of a switched config: the thread that switched it, and what its owner has for these

Change = tuple[dict, str, Any]  # a table, the name of an entry, and what it is to be


@contextmanager
def changed(changes: Sequence[Change]) -> Iterator[None]:
    """Inside, these tables have these entries. Afterwards they are as they were, also if a Ctrl-C falls into that."""
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


_switching = threading.RLock()  # held while a model is switched, and back


class InUse(RuntimeError):
    """Another thread decodes with a model at this moment."""


def path_of(model: PreTrainedModel) -> str | None:
    """The path that `model` is switched to by this thread; None if it is as its owner left it."""
    thread, path, _ = vars(model).get("_bass_path", (None, None, None))
    return path if thread == threading.get_ident() else None


def as_found(model: PreTrainedModel) -> AbstractContextManager[None]:
    """Inside, a model that is switched to a path has its owner's configuration, as its encoder wants it."""
    return changed(vars(model).get("_bass_path", (None, None, ()))[2])


class Switch:
    """Switches `model` to an attention path and back. Its modules are looked through once, for many times; modules that
    it is given later keep their mode."""

    def __init__(
        self,
        model: PreTrainedModel,
        path: str,
        replaced: Sequence[Change],
        kept: Sequence[Change] = (),
        faster: Sequence[Change] = (),
    ):
        """replaced: what the architecture needs over a ragged cache (`architectures.replacements`). kept: what writes
        hidden states into this runner's cache. faster: modules that compute the same in fewer operators; a module whose
        `forward` somebody replaced keeps that one."""
        self.model, self.path, self._modules = model, path, [vars(module) for module in model.modules()]
        self._configs = [vars(each) for each in configurations(model)]
        self._replaced, self._kept, self._faster = replaced, kept, faster

    @property
    def is_on(self) -> bool:
        """Return True if the model is switched so, by this switch or by another that does the same."""
        kept = all(table.get(name) is value for table, name, value in self._kept)
        return kept and path_of(self.model) == self.path

    @contextmanager
    def on(self) -> Iterator[None]:
        """Run the model with the path, in evaluation mode; leave it exactly as it was found.

        Raises InUse while another thread runs it, or a model that has a config object in common with it: each would
        find it changed, and back again.
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
        """Return what `on` changes. Raises InUse."""
        paths, thread = self._configs, threading.get_ident()
        if any(config[OWN][0] != thread for config in paths if OWN in config):
            raise InUse(
                f"{type(self.model).__name__}, or a model that shares its config object, is decoding in another thread "
                "at this moment; give each thread models of its own, or one Session to all"
            )
        # A draft may share the config of a target that is switched already.
        own = [
            config[OWN][1] if OWN in config else {name: config[name] for name in SWITCHED if name in config}
            for config in paths
        ]
        found = [(config, *entry) for config, kept in zip(paths, own, strict=True) for entry in kept.items()]
        changes = [(vars(self.model), "_bass_path", (thread, self.path, found))]
        changes += [*self._replaced, *self._kept]
        changes += [change for change in self._faster if "forward" not in change[0]]
        changes += [(config, internals.ATTENTION, registered_name(self.path)) for config in paths]
        changes += [(config, OWN, (thread, kept)) for config, kept in zip(paths, own, strict=True)]
        # GPT-2 looks for this id in every pass, and has the host wait, to warn of padding that there is not.
        return changes + [(paths[0], "pad_token_id", None)] * ("pad_token_id" in paths[0])


def evaluating(modules: Iterable[dict]) -> AbstractContextManager[None]:
    """Evaluation mode for the modules that these are the `vars` of; those that were training train again afterwards."""
    return changed([(module, "training", False) for module in modules if module["training"]])


def configurations(model: PreTrainedModel) -> list[PreTrainedConfig]:
    """Return the model's configuration, all below it, and those of its modules.

    Parts of T5 have copies. A layer that was taken from another model has that model's.
    """
    found = [config for module in model.modules() if isinstance(config := vars(module).get("config"), PreTrainedConfig)]
    found.insert(0, model.config)
    for config in found:
        found += [sub for name in config.sub_configs if (sub := getattr(config, name, None)) is not None]
    return list({id(config): config for config in found}.values())


def is_plain(part: nn.Module | None) -> bool:
    """Whether a module is a product of torch's own, of weights like any others, and nobody stands in for it."""
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
    """Whether somebody stands in for a module, or hooks it."""
    return bool("forward" in vars(module) or module._forward_hooks or module._forward_pre_hooks)


def written_in(function: object) -> str | None:
    """The file of a function's code; None of what has no code in Python. One that wraps another is of the wrapper's."""
    return getattr(getattr(function, "__code__", None), "co_filename", None)
