"""Profiler events of a GPU, written by hand."""

import json

from bass_lab.measure import kernel_events

MAIN, OTHER, GPU = 100, 101, 0  # thread, another thread, the device's process


def event(category, name, start, duration, thread=MAIN, process=1, **args):
    names = {"External_id": "External id"}
    args = {names.get(key, key): value for key, value in args.items()}
    return {"ph": "X", "cat": category, "name": name, "pid": process, "tid": thread, "ts": start, "dur": duration,
            "args": args}  # fmt: skip


def phase(step, name, start, end, thread=MAIN):
    return event("user_annotation", kernel_events.range_name(step, name), start, end - start, thread)


def launch(correlation, start, thread=MAIN, call="cudaLaunchKernel", category="cuda_runtime"):
    return event(category, call, start, 2, thread, correlation=correlation)


def kernel(name, start, duration, correlation=None, category="kernel", stream=7, **args):
    args |= {} if correlation is None else {"correlation": correlation}
    return event(category, name, start, duration, stream, GPU, device=0, stream=stream, **args)


def write_gpu_profile(path, kernels=True, **about):
    """Write two steps on a GPU: the draft's kernels still run when the host starts verification."""
    events = []
    for step, zero in ((0, 0), (1, 120)):
        names = ("plan", "draft", "verify", "commit")
        edges = [zero + edge for edge in (0, 10, 30, 50, 100)]
        events += [phase(step, name, a, b) for name, a, b in zip(names, edges, edges[1:], strict=False)]
        ids = [10 * step + place for place in range(4)]
        events += [launch(one, zero + at) for one, at in zip(ids, (12, 20, 32, 52), strict=True)]
        ran = [("gemm", 20, 15), ("gemm", 40, 10), ("attention", 52, 20), ("Memcpy DtoH", 90, 2)]
        if kernels:
            events += [kernel(name, zero + at, ms, one) for one, (name, at, ms) in zip(ids, ran, strict=True)]
    steps = {"run": [0, 0], "number": [1, 2], "kind": ["decode"] * 2, "rows": [2, 2], "k": [1, 1]}
    steps |= {"drafted": [2, 2], "accepted": [1, 2], "emitted": [3, 4]}
    about = {"device_type": "cuda", "device": "a GPU"} | about
    path.write_text(json.dumps({"traceEvents": events, "bass": {"about": about, "steps": steps}}))
    return path
