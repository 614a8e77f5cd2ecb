"""How far a command's work is, on standard error: a bar with the time left in a terminal, a line per part elsewhere."""

from __future__ import annotations

from contextlib import AbstractContextManager

import typer

FORM = "{desc} {percentage:3.0f}% |{bar}| {elapsed}, {remaining} left"


class Progress:
    """Called with what is being done and the share, 0 to 1, of the work done. A context: the bar goes when it ends."""

    def __init__(self) -> None:
        from tqdm import tqdm

        look = {"bar_format": FORM, "leave": False, "dynamic_ncols": True}
        self._bar = tqdm(total=1.0, disable=None, miniters=0, smoothing=0, **look)
        self._doing = ""

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_) -> None:
        self._bar.close()

    def __call__(self, doing: str, share: float) -> None:
        if self._bar.disable and doing != self._doing:
            typer.echo(f"  {doing}", err=True)
        self._bar.update(min(share, 1.0) - self._bar.n)  # is drawn ten times a second at most
        if doing != self._doing:
            self._bar.set_description_str(doing)
        self._doing = doing

    def aside(self) -> AbstractContextManager:
        """In this context standard output can be written to: the bar stands below what is printed."""
        return self._bar.external_write_mode()
