"""Count the kernels that a decode step launches on an H100, on a machine without a GPU.

    python -m bass_lab.measure.launch_counts          # the GPU benchmark's pair, batch 8, five drafts, layers compiled

The step runs over *fake* tensors: real sizes, device "cuda", no memory. Three sources of launches are counted:

* An operator called from Python is one launch. A view or an uninitialized tensor is no launch. A few operators launch
  two kernels on a GPU (a long sort, a sum over few rows); for these operators the count is a lower bound.
* A compiled region launches the kernels in the CUDA code that inductor generates: each generated kernel, each product
  and each other library call. The code is generated as usual, and read instead of run.
* A `bass::` operator launches the Triton kernels of its launcher and the operators around these kernels.

Launch durations are not modelled. The count changes torch permanently (`_guard_devices`): use a separate process.
"""

from __future__ import annotations

import argparse
import ctypes
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import pandas as pd
import torch
import torch._dynamo.device_interface
import torch._inductor.compile_fx
import triton
from torch import Tensor
from torch._inductor.fx_passes import joint_graph, post_grad
from torch._inductor.graph import GraphLowering
from torch._subclasses import fake_tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM, PreTrainedConfig
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from bass_core.drafters import ModelDrafter, Setting
from bass_core.exactness import randomness
from bass_core.exactness.sampling import SamplingParams
from bass_core.gpu import compiled_layers
from bass_core.gpu.graph_step import GraphStep
from bass_core.gpu.graphs import Graphs, launched_each_time
from bass_core.loop.phases import Phases
from bass_core.loop.rows import Rows
from bass_core.loop.step import EagerStep, StepOptions
from bass_core.model import kernel_ops
from bass_core.model.architectures import layers_of
from bass_core.model.runner import Runner
from bass_core.policies.protocol import FixedLength
from bass_lab.named_pairs import SHAPES, named_config

PROMPT = 512  # tokens of every row
LAUNCH = re.compile(r"^ +(?:\w+ = )?(?:triton_\w+\.run\(|extern_kernels\.|torch\.ops\.(?!bass\.)|aten\.)", re.MULTILINE)
UNFILLED = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "lift_fresh", "_unsafe_view"}
PROPERTIES = {
    "name": "NVIDIA H100 80GB HBM3",
    "major": 9,
    "minor": 0,
    "multi_processor_count": 132,
    "total_memory": 80 << 30,
    "warp_size": 32,
    "regs_per_multiprocessor": 65536,
    "max_threads_per_multi_processor": 2048,
    "max_threads_per_block": 1024,
    "shared_memory_per_block": 48 << 10,
    "shared_memory_per_block_optin": 227 << 10,
    "shared_memory_per_multiprocessor": 228 << 10,
    "L2_cache_size": 50 << 20,
    "is_integrated": 0,
    "gcnArchName": "",
}


def launches(
    target: PreTrainedConfig,
    draft: PreTrainedConfig,
    *,
    batch: int = 8,
    draft_length: int = 5,
    temperature: float = 0.0,
    compiled: bool = True,
) -> pd.DataFrame:
    """Return the launches of a warm decode step of `batch` rows, with models of these configs on the path "ragged".

    One line per phase ("draft", "verify"), place ("layers", "around" the layers of a pass, "glue" outside the passes)
    and what (a kernel of this project, an operator of torch, or a compiled region's "product" or "fused" kernels).
    Columns: launches, each (launches per layer and pass for "layers", per pass for "around", unchanged for "glue").
    """
    counted = _Counted()
    with torch.device("meta"):
        models = [AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval() for config in (target, draft)]
    with _absent_gpu(counted), torch.no_grad(), counted.fake:
        for model in models:
            model.to_empty(device="cuda").tie_weights()
        params, vocabulary = SamplingParams(temperature), target.vocab_size
        layers = compiled_layers.CompiledLayers if compiled else compiled_layers.LaunchedLayers
        setting = Setting(models[0], ["ragged"] * 2, batch, vocabulary, layers=layers)
        drafter = ModelDrafter(models[1]).begin(setting)
        runners = Runner(models[0], "ragged", batch, 2 * PROMPT, layers=layers), drafter.runner
        drafter.grow(2 * PROMPT)
        rows = Rows(batch, models[0].device, vocabulary, params, ())
        rows.grow(2 * PROMPT)
        phases = Phases(torch.device("cpu"), lambda: None)
        step = GraphStep(EagerStep(rows, runners[0], drafter, StepOptions("token"), phases), Graphs(launched_each_time))
        with counted, ExitStack() as stack:
            for runner in runners:
                stack.enter_context(runner.prepared())
                stack.enter_context(_watched(counted, runner))
            prompts = rows.tokens[:, :PROMPT], [PROMPT] * batch
            drafter.prefill(*prompts, range(batch))
            runners[0].feed_last(*prompts, PROMPT, range(batch))
            rows.lengths_host[:] = PROMPT + 1
            lengths = np.full(batch, draft_length)
            for _ in range(2):  # the first step includes one-time work
                counted.launches.clear()
                context = step.begin(batch, draft_length)
                with counted.at("draft", "glue"):
                    drafted = step.draft(context, lengths, lengths, FixedLength(draft_length))
                with counted.at("verify", "glue"):
                    step.verify(context, drafted)
    passes = {"draft": draft_length, "verify": 1}
    depth = dict(zip(("verify", "draft"), (len(layers_of(model)) for model in models), strict=True))
    table = pd.DataFrame(
        [(*key, count) for key, count in counted.launches.items()], columns=["phase", "place", "what", "launches"]
    )
    times = [
        {"layers": depth[p] * passes[p], "around": passes[p]}.get(place, 1)
        for p, place in zip(table.phase, table.place, strict=True)
    ]
    return table.assign(each=table.launches / times).sort_values(["phase", "place", "what"], ignore_index=True)


class _Counted(TorchDispatchMode):
    """Dispatch mode that counts launches over fake tensors by phase, place and name."""

    def __init__(self):
        super().__init__()
        self.fake = fake_tensor.FakeTensorMode(allow_non_fake_inputs=True)
        self.launches: Counter[tuple[str, str, str]] = Counter()
        self._place = "", ""
        self._within = False  # inside a compiled region, whose launches `compile` counts

    @contextmanager
    def at(self, phase: str | None, place: str) -> Iterator[None]:
        before, self._place = self._place, (phase or self._place[0], place)
        try:
            yield
        finally:
            self._place = before

    def add(self, what: str, count: int = 1) -> None:
        self.launches[*self._place, what] += count

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if operator.namespace == "bass":  # run the operator's body over fake tensors
            with self, patch.object(self, "_within", False):
                return getattr(kernel_ops, operator.overloadpacket.__name__)._init_fn(*args, **kwargs)
        result = operator(*args, **kwargs)
        if not self._within and _fills_memory(operator, args, result):
            self.add(operator.overloadpacket.__name__)
        return result

    def compile(self, graph: torch.fx.GraphModule, inputs: list) -> Callable:
        """Act as a torch.compile backend: count the launches in inductor's code, and run the operators for shapes."""
        found = LAUNCH.findall(_code(graph, inputs))
        fused = sum("triton_" in line for line in found)

        def call(*arguments):
            self.add("fused", fused)
            self.add("product", len(found) - fused)
            with self.fake, self, patch.object(self, "_within", True):
                return graph(*arguments)

        return call


def _fills_memory(operator, args: tuple, result: object) -> bool:
    """Return True if an operator writes to device memory."""
    if operator.is_view or operator.overloadpacket.__name__ in UNFILLED:
        return False
    results = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
    same = any(leaf is each for leaf in results for each in args)  # a conversion without effect
    return any(leaf.is_cuda for leaf in results) and (operator._schema.is_mutable or not same)


def _code(graph: torch.fx.GraphModule, inputs: list) -> str:
    """Return inductor's code that calls this graph's kernels on an H100."""
    found = []

    def read(lowering: GraphLowering) -> SimpleNamespace:
        found.append(lowering.codegen()[0].value)
        return SimpleNamespace(call=print, __file__="", runner=None)

    with ExitStack() as stack:
        stack.enter_context(patch.object(GraphLowering, "compile_to_module", read))
        # Patched only here: if torch saw a GPU elsewhere, fake tensors would try to use the GPU.
        stack.enter_context(patch.object(torch.cuda, "is_available", lambda: True))
        stack.enter_context(patch.object(torch.cuda, "device_count", lambda: 1))
        torch._inductor.compile_fx.compile_fx(graph, inputs)
    return "".join(code.partition("async_compile.wait(")[2].partition("\ndef get_args(")[0] for code in found)


@contextmanager
def _watched(counted: _Counted, runner: Runner) -> Iterator[None]:
    """Attribute launches inside this runner's passes to "around", and launches inside the layers to "layers"."""
    feed, layers = runner.feed, layers_of(runner.model)

    def fed(*args, **kwargs) -> Tensor:
        with counted.at(None, "around"):
            return feed(*args, **kwargs)

    inside = ExitStack()
    with ExitStack() as stack:
        stack.enter_context(patch.object(runner, "feed", fed))
        for layer in layers:
            enter = layer.register_forward_pre_hook(
                lambda *_: inside.enter_context(counted.at(None, "layers")) and None
            )
            leave = layer.register_forward_hook(lambda *_: inside.close())
            stack.callback(enter.remove)
            stack.callback(leave.remove)
        yield


@contextmanager
def _absent_gpu(counted: _Counted) -> Iterator[None]:
    """Make torch and triton see an H100, and count launches."""
    _guard_devices()
    properties = SimpleNamespace(**PROPERTIES)
    answers = {
        "current_device": 0,
        "get_device_properties": properties,
        "_get_device_properties": properties,  # exists only in CUDA builds
        "get_device_capability": (9, 0),
        "get_device_name": properties.name,
        "_lazy_init": None,
        "_exchange_device": 0,
        "_maybe_exchange_device": 0,
        "get_rng_state": torch.zeros(1, dtype=torch.uint8),
        "set_rng_state": None,
    }
    gpu = SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", 90, 32),
        get_current_device=lambda: 0,
        get_current_stream=lambda *_: 0,
    )
    with ExitStack() as stack:
        for name, answer in answers.items():
            function = lambda *_, answer=answer, **__: answer  # noqa: E731
            stack.enter_context(patch.object(torch.cuda, name, function, create=True))
        stack.enter_context(patch.object(driver, "_active", gpu, create=True))
        stack.enter_context(patch("torch._inductor.scheduler.has_triton", lambda *_: True))
        for module in (joint_graph, post_grad):  # whose patterns would run on the device
            stack.enter_context(patch.object(module, "lazy_init", lambda *_: None))
        stack.enter_context(patch.object(fake_tensor, "init_gpu_context", lambda *_: None))
        stack.enter_context(torch._inductor.config.patch(compile_threads=1, fx_graph_cache=False))
        stack.enter_context(
            patch.object(triton.JITFunction, "run", lambda kernel, *_, **__: counted.add(kernel.__name__))
        )
        stack.enter_context(patch.object(kernel_ops, "obstacle", lambda device: None))
        stack.enter_context(patch.object(compiled_layers, "BACKEND", counted.compile))
        stack.enter_context(patch.object(compiled_layers, "_compiled", {}))
        for forget in (torch._dynamo.reset, randomness._words.cache_clear):  # fake tensors belong to a single run
            forget()
            stack.callback(forget)
        yield


def _guard_devices() -> None:
    """Register a no-op CUDA device guard. Without a guard, CPU builds of torch cannot slice fake CUDA tensors."""
    with fake_tensor.FakeTensorMode():
        try:
            torch.empty(1, device="cuda")[:1]
            return
        except RuntimeError:
            pass
    torch_folder = Path(torch.__file__).parent
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder, "guard.cpp"), Path(folder, "guard.so")
        source.write_text(
            "#include <c10/core/impl/DeviceGuardImplInterface.h>\n"
            "C10_REGISTER_GUARD_IMPL(CUDA, c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA>)\n"
        )
        include, lib = torch_folder / "include", torch_folder / "lib"
        options = ["-std=c++20", "-shared", "-fPIC", f"-I{include}", f"-L{lib}", "-lc10"]
        subprocess.run(["g++", source, "-o", library, *options], check=True)
        ctypes.CDLL(str(library))


def named(shape: str, layers: int | None = None) -> tuple[PreTrainedConfig, PreTrainedConfig]:
    """Return the configs of a pair in `named_pairs.SHAPES`. layers: of the target (None: unchanged)."""
    target, draft = (named_config(each, shape) for each in (SHAPES[shape].target, SHAPES[shape].draft))
    target.num_hidden_layers = layers or target.num_hidden_layers
    return target, draft


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="paper-7.8b", choices=SHAPES)
    parser.add_argument("--layers", type=int, help="layers of the target; fewer layers are counted faster")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--draft-length", type=int, default=5)
    parser.add_argument("--temperature", type=float, nargs="*", default=[0.0, 1.0])
    parser.add_argument("--compile", default="compiled", choices=("compiled", "off"))
    parser.add_argument("--by-operator", action="store_true")
    args = parser.parse_args()
    for temperature in args.temperature:
        shape = {"batch": args.batch, "draft_length": args.draft_length, "temperature": temperature}
        table = launches(*named(args.shape, args.layers), **shape, compiled=args.compile == "compiled")
        sums = table.groupby(["phase", "place"])[["launches", "each"]].sum()
        print(f"{args.shape}, {shape}: {table.launches.sum()} launches\n", sums.to_string(), "\n")
        if args.by_operator:
            print(table.to_string(), "\n")


if __name__ == "__main__":
    main()
