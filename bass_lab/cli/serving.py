"""`bass serve`: serve one pair through an OpenAI-compatible HTTP API."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Annotated

import typer

from bass_lab.cli import common
from bass_lab.serve import NEEDS

ORIGIN = r"[a-z][a-z0-9+.-]*://[^/\s]+|null|\*"
EXAMPLES = common.examples(
    "bass serve --port 0",
    "bass serve -t Qwen/Qwen2.5-7B-Instruct -d Qwen/Qwen2.5-0.5B-Instruct \\",
    "    --dtype bfloat16 --batch-size 16",
)


def serve(
    target: common.Target = None,
    draft: common.Draft = None,
    dtype: common.Dtype = None,
    device: common.Device = None,
    host: Annotated[str, typer.Option(metavar="HOST", help="address; needs an API key unless local")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, metavar="N", help="0 selects a free port")] = 8000,
    api_key: Annotated[
        str | None,
        typer.Option(envvar="BASS_API_KEY", show_envvar=False, metavar="KEY", help="or BASS_API_KEY; default: no key"),
    ] = None,
    allow_origin: Annotated[
        list[str] | None,
        typer.Option(metavar="ORIGIN", help="allow requests from this site's pages (CORS); may be repeated"),
    ] = None,
    batch_size: common.BatchSize = 8,
    queue: Annotated[int, typer.Option(min=0, metavar="N", help="maximum waiting rows; more get status 429")] = 64,
    deadline: Annotated[
        float | None, typer.Option(min=0.001, metavar="S", help="maximum seconds per row; default: no limit")
    ] = None,
    drain: Annotated[float, typer.Option(min=0, metavar="S", help="seconds for running rows after SIGTERM")] = 30.0,
    draft_length: common.DraftLength = None,
    prefill_chunk: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="prefill in chunks of N tokens; default: whole prompts")
    ] = None,
    verification: common.Verification = "token",
    attention: common.Attention = "auto",
    compile: common.Compile = "auto",
    as_json: common.Json = False,
) -> None:
    """Serve a pair through an OpenAI-compatible API.

    Serves /v1/completions, /v1/chat/completions, /v1/models, /health and /metrics until SIGTERM or Ctrl-C. Rows of all
    requests share the batch. With --json the server prints model, address and docs when it is ready. Exit code 0:
    SIGTERM or Ctrl-C; 1: the engine failed; 2: the server cannot start.
    """
    if missing := [name for name in NEEDS if importlib.util.find_spec(name) is None]:
        raise ValueError(f"bass serve needs {', '.join(missing)}: pip install '.[serve]' in the checkout")
    if api_key is not None:
        api_key = api_key.strip()  # a key from a file may end with a newline
        if not api_key or not api_key.isprintable():
            what = "has unprintable characters" if api_key else "is empty"
            raise ValueError(f"the API key {what}: give printable text, or leave the key out")
    for origin in allow_origin or ():
        if not re.fullmatch(ORIGIN, origin):
            raise ValueError(f"--allow-origin {origin}: write scheme://host[:port] without a path, null or *")
    from bass_lab.serve.server import Server, Settings, bound

    with bound(host, port, api_key) as listening:  # fail on a used port before loading models
        from bass_lab.named_pairs import named_pair

        pair = named_pair(target, draft, dtype=dtype, device=device)
        if pair.tokenizer is None:
            raise ValueError("bass serve needs a target with a tokenizer")
        name = "embedded" if target is None else Path(target).name if Path(target).is_dir() else target
        session = {
            "draft_length": draft_length, "prefill_chunk": prefill_chunk, "verification": verification,
            "attention": attention, "compile": compile,
        }  # fmt: skip
        settings = Settings(name, batch_size, queue, deadline, drain, api_key, tuple(allow_origin or ()), session)
        server = Server(pair, settings, lambda where: _tell(where, as_json))
        server.run(sockets=[listening])
    if server.failed:
        raise typer.Exit(1)


def _tell(where: dict[str, str], as_json: bool) -> None:
    if as_json:
        common.print_json(where)
    else:
        typer.echo(f"{where['model']} at {where['address']}, documented at {where['docs']}")
