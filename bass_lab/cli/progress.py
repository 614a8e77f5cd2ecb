"""Show progress on standard error: a bar with the remaining time in a terminal, otherwise a line per stage."""

from __future__ import annotations

from contextlib import AbstractContextManager

import typer

FORM = "{desc} {percentage:3.0f}% |{bar}| {elapsed}, {remaining} left"


class Progress:
    """Callback for a stage and the share of the work done, 0 to 1. Leaving the context removes the bar."""

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
        self._bar.update(min(share, 1.0) - self._bar.n)  # tqdm draws at most ten times a second
        if doing != self._doing:
            self._bar.set_description_str(doing)
        self._doing = doing

    def aside(self) -> AbstractContextManager:
        """Return a context for printing to standard output. The bar moves below the printed text."""
        return self._bar.external_write_mode()
