"""Run notebooks in kernels. One process imports the libraries once and forks a kernel per notebook."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from jupyter_client import BlockingKernelClient
from jupyter_client.connect import write_connection_file

if TYPE_CHECKING:
    import nbformat

PATIENCE = 600  # seconds per cell
LOADED = ["ipykernel.kernelapp", "ipywidgets", "plotly.graph_objects", "torch._dynamo", "bass_core", "bass_lab"]
LOADED += ["transformers.models.qwen2.modeling_qwen2"]


def run_cells(notebook: nbformat.NotebookNode, folder: Path, *, fresh: bool = False, **environment: str) -> int:
    """Run the code cells in `folder` and return their number. Raises AssertionError with source and traceback of a
    failed cell.

    fresh: start a new process without loaded libraries.
    """
    sources = [cell.source for cell in notebook.cells if cell.cell_type == "code"]
    with _kernel(folder, "spawn" if fresh else "forkserver", environment) as client:
        for source in sources:
            reply = client.execute_interactive(source, output_hook=lambda message: None, timeout=PATIENCE)["content"]
            assert reply["status"] == "ok", "\n".join([source, *reply.get("traceback", [])])
    return len(sources)


@contextlib.contextmanager
def _kernel(folder: Path, method: str, environment: dict[str, str]) -> Iterator[BlockingKernelClient]:
    context = multiprocessing.get_context(method)
    context.set_forkserver_preload(LOADED)
    with tempfile.TemporaryDirectory(prefix="kernel-") as place:  # sockets need a short path; ports may be taken
        file, _ = write_connection_file(f"{place}/kernel.json", transport="ipc", ip=f"{place}/kernel")
        process = context.Process(target=_serve, args=(file, folder, os.environ | environment))
        process.start()
        client = BlockingKernelClient(connection_file=file)
        client.load_connection_file()
        client.start_channels(hb=False)
        try:
            client.wait_for_ready(timeout=PATIENCE)
            yield client
        finally:
            client.shutdown()
            process.join(10)
            process.kill()
            client.stop_channels()


def _serve(file: str, folder: Path, environment: dict[str, str]) -> None:
    os.environ.update(environment)
    os.chdir(folder)
    from ipykernel.kernelapp import IPKernelApp

    IPKernelApp.launch_instance(
        argv=["-f", file, f"--IPKernelApp.parent_handle={os.getppid()}"]
    )  # ends with the parent process
