"""A pytest plugin that makes Triton's interpreter twice as fast by skipping unused work.

No number changes. The plugin is written for the pinned version of triton. Other versions may fail at import.
"""

from triton.runtime import interpreter

# Without debug mode, the repeated integer sums and products in 64 bits are unnecessary.
assert not interpreter.interpreter_builder.options.debug
object.__setattr__(interpreter.interpreter_builder.options, "sanitize_overflow", False)

# Replace the functions of triton.language once, not at every launch and every call between kernels.
_patch_lang, _patched = interpreter._patch_lang, set()


def _patch_once(kernel):
    if kernel.__module__ not in _patched:
        _patched.add(kernel.__module__)
        _patch_lang(kernel)
    return interpreter._LangPatchScope()  # nothing to undo after a launch


interpreter._patch_lang = _patch_once

# Loops over a tensor's value: triton 3.6 gives an array of one element, and numpy 2.4 no longer converts it.
_patch_lang_tensor = interpreter._patch_lang_tensor


def _patch_index(tensor, *scope):
    _patch_lang_tensor(tensor, *scope)
    tensor.__index__ = lambda self: self.handle.data.item()


interpreter._patch_lang_tensor = _patch_index
