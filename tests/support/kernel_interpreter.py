"""A pytest plugin: Triton's interpreter without work whose result it throws away, which takes half of its time.

No number changes. It is written for the version of triton that is pinned; where another lacks what is replaced here,
the import fails.
"""

from triton.runtime import interpreter

# Sums and products of integers are made again in 64 bits, for an assertion that only debug mode makes.
assert not interpreter.interpreter_builder.options.debug
object.__setattr__(interpreter.interpreter_builder.options, "sanitize_overflow", False)

# Every launch, and every call from kernel to kernel, replaces the functions of triton.language again; here they stay.
_patch_lang, _patched = interpreter._patch_lang, set()


def _patch_once(kernel):
    if kernel.__module__ not in _patched:
        _patched.add(kernel.__module__)
        _patch_lang(kernel)
    return interpreter._LangPatchScope()  # nothing to undo after a launch


interpreter._patch_lang = _patch_once

# Loops over a tensor's value: numpy 2.4 takes no array of one element for a number any more, and triton 3.6 gives one.
_patch_lang_tensor = interpreter._patch_lang_tensor


def _patch_index(tensor, *scope):
    _patch_lang_tensor(tensor, *scope)
    tensor.__index__ = lambda self: self.handle.data.item()


interpreter._patch_lang_tensor = _patch_index
