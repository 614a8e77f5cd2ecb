"""Parameters of notebooks for tests, and functions that run notebooks and find Chromium."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import gpu_box
import pytest

from bass_lab.measure import records
from bass_lab.sweep.run_process import through_files

if TYPE_CHECKING:
    import nbformat

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"
# Slow tests run every lesson with its defaults, except repeats: no cell asserts times. The demo runs lesson 00.
DEFAULTS = {
    "00_start_here": {"batch_size": 2, "draft_length": 3, "max_new_tokens": 24, "repeats": 2},
    "01_speculative_decoding": {"repeats": 2},
    "08_latency_and_utilization": {"repeats": 2},
    "11_interactive_serving": {"served_count": 20},
}
QUICKER = DEFAULTS | {
    "01_speculative_decoding": {"batch_size": 4, "max_new_tokens": 24, "repeats": 1},
    "02_ragged_batches": {"batch_size": 4, "max_new_tokens": 20},
    "03_acceptance_explorer": {"batch_size": 3, "max_new_tokens": 24},
    "04_draft_length": {"batch_sizes": [1, 8], "max_new_tokens": 48, "repeats": 3},
    "04b_draft_length_further": {"batch_sizes": [1, 8], "max_new_tokens": 48, "repeats": 3},
    "05_draft_models": {
        "ladder": ["draft", "deep_draft"], "drafts": ["ngram", "target:int4", "feature_head"], "batch_sizes": [1, 4],
        "max_new_tokens": 16, "repeats": 1, "aligning_tokens": 10_000, "prompt_count": 24,
    },
    "06_kernel_timelines": {"batch_size": 4, "max_new_tokens": 32},
    "08_latency_and_utilization": {"batch_size": [1, 4], "max_new_tokens": 16, "repeats": 2},
    "09_quality_within_a_time_budget": {"problem_count": 3, "batch_size": 4, "max_new_tokens": 64},
    "10_quantization": {"batch_size": 2, "max_new_tokens": 16, "prompt_count": 4, "problem_count": 2, "repeats": 1},
    "11_interactive_serving": {
        "request_count": 40, "shares": [0.3, 1.1], "served_count": 6, "max_new_tokens": 24, "calibration_seconds": 1.0,
    },
    "13_beyond_decoders": {"batch_size": 2, "max_new_tokens": 16, "source_count": 4, "repeats": 1},
    "14_the_paper": {"batch_size": 4, "batch_sizes": [4, 16], "max_new_tokens": 16, "problem_count": 1, "repeats": 1},
}  # fmt: skip
ONE = {"batch_size": 1, "draft_length": 1, "repeats": 1}
SMALLEST = {  # `make test`: the smallest values, and the default policy if the lesson takes it
    "00_start_here": {"batch_size": 1, "draft_length": None, "max_new_tokens": 4, "repeats": 1},
    "01_speculative_decoding": ONE | {"max_new_tokens": 8},
    "02_ragged_batches": {"batch_size": 1, "draft_length": 1, "max_new_tokens": 4},
    "02b_write_the_loop": {"batch_size": 1, "draft_length": 1, "max_new_tokens": 4},
    "03_acceptance_explorer": {"batch_size": 1, "draft_length": None, "max_new_tokens": 4},
    "04_draft_length": {"batch_sizes": [16], "max_new_tokens": 8, "repeats": 1},
    "04b_draft_length_further": {"batch_sizes": [16], "max_new_tokens": 8, "repeats": 1},
    "05_draft_models": {
        "ladder": ["draft"], "drafts": ["ngram"], "batch_sizes": [1], "draft_length": 1, "max_new_tokens": 4,
        "repeats": 1, "aligning_tokens": 1, "prompt_count": 4,
    },
    "06_kernel_timelines": {"batch_size": 1, "draft_length": None, "max_new_tokens": 16},
    "07_ragged_attention_kernels": {"kv_lengths": [5], "draft_length": 0, "heads": 1, "kv_heads": 1, "head_dim": 16},
    "08_latency_and_utilization": {"batch_size": 1, "draft_length": None, "max_new_tokens": 2, "repeats": 1},
    "09_quality_within_a_time_budget": {"problem_count": 1, "batch_size": 1, "max_new_tokens": 1},
    "10_quantization": ONE | {"max_new_tokens": 2, "prompt_count": 2, "problem_count": 1},
    "11_interactive_serving": {
        "batch_size": 1, "request_count": 20, "shares": [1.0], "served_count": 5, "draft_length": 1,
        "max_new_tokens": 2, "deadline": 0.1, "prefill_chunk": 400, "calibration_seconds": 0.1,
    },
    "13_beyond_decoders": ONE | {"max_new_tokens": 2, "source_count": 1},
    "14_the_paper": ONE | {"batch_sizes": [16], "max_new_tokens": 2, "problem_count": 1, "samples": [1]},
}  # fmt: skip
TWICE = dict(SMALLEST)
# Cells that run before the lesson with the smallest values. tests/lab checks all drafters and the whole corpus.
PREPARED = {
    "01_speculative_decoding": """\
import functools
from bass_lab.lessons import l01_demonstrations
l01_demonstrations.measured_costs = functools.partial(l01_demonstrations.measured_costs, repeats=1)
""",
    "05_draft_models": """\
import functools
from bass_lab.checks import drafter_checks
from bass_lab.pair import alignment
from bass_lab.texts import corpus
drafter_checks.WAYS = [(*drafter_checks.WAYS[1][:3], 3)]
drafter_checks.NEW, drafter_checks.ROWS, alignment.BATCH = 3, 3, 1
corpus.library_functions = functools.partial(corpus.library_functions, held_out=True)
""",
}
HALF = {  # another dtype: texts need not be identical
    name: QUICKER[name] | {"dtype": "bfloat16"}
    for name in QUICKER
    if name not in ("04_draft_length", "04b_draft_length_further", "09_quality_within_a_time_budget")
}


def without_gpus(folder: Path) -> Path:
    folder.mkdir(parents=True)
    for record in records.SHIPPED.iterdir():
        if not gpu_box.of_a_stage(record):
            (folder / record.name).symlink_to(record)
    return folder


def execute(name: str, folder: Path, /, **parameters) -> nbformat.NotebookNode:
    """Run a notebook (name without ending) with these parameters in `folder`. Return the notebook with outputs."""
    notebook = NOTEBOOKS / f"{name}.ipynb"
    return papermill_run(notebook, folder / "out.ipynb", parameters, cwd=folder, store_widget_state=False)


def parameterized(name: str, folder: Path, /, **parameters) -> nbformat.NotebookNode:
    """Return a notebook with these parameters, without running it. `folder` receives a copy."""
    return papermill_run(NOTEBOOKS / f"{name}.ipynb", folder / f"{name}.ipynb", parameters, prepare_only=True)


def papermill_run(notebook: Path, copy: Path, parameters: dict, **options) -> nbformat.NotebookNode:
    import papermill  # here: tests of exercises must not need papermill
    from jupyter_client import AsyncKernelManager

    with tempfile.TemporaryDirectory(prefix="kernel-") as place:  # pytest's folder names are too long for a socket
        options["kernel_manager_class"] = through_files(AsyncKernelManager, Path(place))
        return papermill.execute_notebook(notebook, copy, parameters=parameters, progress_bar=False, **options)


def chromium() -> str:
    """Return the path of Chromium, or skip the test. CI installs Chromium and must not skip."""
    found = shutil.which("chromium")
    if found is None:
        assert not os.environ.get("CI"), "CI installs chromium: this test may not be skipped there"
        pytest.skip("no chromium on this machine (apt-get install chromium)")
    return found
