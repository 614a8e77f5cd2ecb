"""CUDA graphs emulated on a CPU: a replay repeats the captured operators on the same addresses with the same numbers.

The recorder freezes host lengths, host tensors and Python branches. It refuses host reads and tensors made from host
values. CUDA graphs behave the same.
"""

from collections import Counter
from dataclasses import replace

import torch
from tiny import ragged_prompts, tiny_model
from torch.utils._pytree import tree_leaves

import bass_core as bass
from bass_core import session as session_module
from bass_core.execution import Execution
from bass_core.gpu import overlap
from bass_core.gpu.graph_step import GraphStep
from bass_core.gpu.graphs import Graphs, NothingReadByHost, launched_each_time
from bass_lab.checks.oracle import Oracle


class Recorder(NothingReadByHost):
    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        before = len(self.calls)
        result = super().__torch_dispatch__(operator, types, args, kwargs)
        if len(self.calls) == before:  # a composite operator recorded its parts
            given = {storage(tensor) for tensor in tensors((args, kwargs))}
            # Views and arguments change without a copy. A replay copies new results into the old memory.
            found = [tensor if storage(tensor) not in given else None for tensor in tensors(result)]
            self.calls.append((operator, args, kwargs or {}, found))
        return result

    def replay(self) -> None:
        for operator, args, kwargs, found in self.calls:
            for old, new in zip(found, tensors(operator(*args, **kwargs)), strict=True):
                if old is not None:
                    old.copy_(new)


def tensors(values) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]


def storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def recorded(device: torch.device):

    def record(function):
        function()  # warm-up: lazily made state is not captured
        with Recorder() as recorder:
            result = function()

        def replay():
            recorder.replay()
            return result

        return replay

    return record


def use_on_cpu(monkeypatch) -> None:
    execution, gpu = session_module.execution, torch.device("cuda")
    monkeypatch.setattr(overlap, "captured", recorded)
    monkeypatch.setattr(session_module, "execution", lambda wanted, device, *rest: execution(wanted, gpu, *rest))


class Known(Graphs):
    """Graphs that treat every function as captured from the first call."""

    def run(self, key, function):
        self._recordings[key] = function
        return super().run(key, function)


def use_fixed_steps(monkeypatch) -> None:
    """Let sessions take steps of fixed shapes, launched each time, and overlap steps as early as possible."""

    def step(self, eager, fall_back):
        eager.options = replace(eager.options, all_or_none=False)
        return overlap.Overlap(GraphStep(eager, Known(launched_each_time)))

    monkeypatch.setattr(Execution, "step", step)
    _draw_again_what_is_taken_back(monkeypatch)


def _draw_again_what_is_taken_back(monkeypatch) -> None:
    """Let the oracle of `enumeration` draw the random numbers of a discarded step again."""
    oracles, use, take_back = [], Oracle._use, overlap.Overlap.take_back

    def noted(self, *key):
        oracles[:] = [self]
        use(self, *key)

    def taken_back(self):
        take_back(self)
        rows = self.step.rows
        taken = dict(zip(rows.streams.tolist(), rows.steps.tolist(), strict=True))
        for oracle in oracles:
            oracle._keys = {key for key in oracle._keys if key[1] < taken[key[0]]}

    monkeypatch.setattr(Oracle, "_use", noted)
    monkeypatch.setattr(overlap.Overlap, "take_back", taken_back)


def count_ahead(monkeypatch) -> Counter:
    seen, launch, take_back = Counter(), overlap.Overlap._launch, overlap.Overlap.take_back

    def launched(self):
        launch(self)
        seen["launched"] += self.is_ahead

    def taken_back(self):
        seen["taken back"] += 1
        take_back(self)

    monkeypatch.setattr(overlap.Overlap, "_launch", launched)
    monkeypatch.setattr(overlap.Overlap, "take_back", taken_back)
    return seen


PROMPTS = ragged_prompts(5, 11, 3, 17, 8)


def pair(architecture="llama", **changes):
    options = {"dtype": "float64"} | ({"num_hidden_layers": 1} if architecture == "llama" else {})
    return bass.ModelPair(
        tiny_model(architecture, **options, **changes), tiny_model(architecture, **options, noise=0.1)
    )


def assert_same(models, prompts=PROMPTS[:3], new=16, **options):
    """Compare captured with eager steps: sequences, log-probabilities and trace. Return both generations."""
    options = {"eos_token_id": (), "max_new_tokens": new} | options
    policy = options.pop("draft_length")
    make = policy if callable(policy) else lambda: policy
    eager = bass.generate(models, prompts, compile="off", draft_length=make(), **options)
    recorded = bass.generate(models, prompts, compile="graphs", draft_length=make(), **options)
    assert [s.tolist() for s in recorded.sequences] == [s.tolist() for s in eager.sequences]
    assert recorded.finish_reasons == eager.finish_reasons
    for found, expected in zip(recorded.logprobs, eager.logprobs, strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
    columns = ["step", "row", "kind", "k", "drafted", "accepted", "emitted", "kv_length"]
    assert recorded.trace.steps[columns].equals(eager.trace.steps[columns])
    assert (recorded.trace.meta["compile"], eager.trace.meta["compile"]) == ("graphs", "off")
    return recorded, eager


def session(compile="graphs", models=None, **options) -> bass.Session:
    return bass.Session(models or pair(), compile=compile, eos_token_id=(), **({"draft_length": 3} | options))


def submitted(running: bass.Session, prompts=PROMPTS, new=40) -> list:
    return [running.submit(prompt, max_new_tokens=new) for prompt in prompts]


def texts(running: bass.Session, handles) -> list[list[int]]:
    while not running.idle:
        running.step()
    return [running.result(handle).sequence.tolist() for handle in handles]
