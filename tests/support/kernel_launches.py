"""Count a step's launches on a GPU in Triton's interpreter.

Every torch operator counts as one launch (some are more on a GPU), except views and empty memory. An operator of this
project counts as the sum of its kernels and torch operators.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.interpreter import GridExecutor

from bass_core.model import kernel_ops
from bass_core.model.runner import Runner

NO_LAUNCH = {"empty", "empty_strided", "empty_like", "new_empty", "scalar_tensor", "alias", "detach", "_unsafe_view"}


class _Operators(TorchDispatchMode):
    def __init__(self, count: Callable[[str], None]):
        super().__init__()
        self.count = count

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if operator.namespace == "bass":
            with self:
                return getattr(kernel_ops, operator.overloadpacket.__name__)._init_fn(*args, **kwargs)
        with self:
            found = operator.decompose(*args, **kwargs)
        if found is not NotImplemented:
            return found
        name = operator.overloadpacket.__name__
        if not (operator.is_view or name in NO_LAUNCH):
            self.count(name)
        return operator(*args, **kwargs)


@contextmanager
def counted() -> Iterator[dict[str, Counter]]:
    """Count launches of operators and kernels by part: "model" (inside its forward) and "around"."""
    found, part = {"model": Counter(), "around": Counter(), "interpreter": Counter()}, ["around"]
    execute, forward = GridExecutor.__call__, Runner.run_model

    def count(name: str) -> None:
        found[part[0]][name] += 1

    def launch(self, *args, **kwargs):
        count(self.fn.__name__)
        before, part[0] = part[0], "interpreter"
        try:
            return execute(self, *args, **kwargs)
        finally:
            part[0] = before

    def inside(*args):
        part[0] = "model"
        try:
            return forward(*args)
        finally:
            part[0] = "around"

    GridExecutor.__call__, Runner.run_model = launch, inside
    try:
        with _Operators(count):
            yield found
    finally:
        GridExecutor.__call__, Runner.run_model = execute, forward
