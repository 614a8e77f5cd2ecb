"""Live views of lesson 00: a race of two decoders, and a draft length slider. Each leaves a static picture."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence

import pandas as pd
import plotly.graph_objects as go
from IPython import get_ipython
from IPython.display import display

from bass_core.generation import Generation, generate
from bass_core.loading.model_pair import ModelPair
from bass_lab.kept_session import KeptSession
from bass_lab.show import plots
from bass_lab.show.live_figures import live, widgets

LAUNCHED = """ (This picture keeps every token, so on a GPU all kernels are launched one by one. The speeds
further down are measured with captured CUDA graphs.)"""


class Race:
    """Regular and speculative decoding of the same prompts, side by side with two clocks.

    regular, speculative: the two `Generation`s. seconds: the two wall times. identical: number of rows with equal
    tokens.
    """

    def __init__(
        self, pair: ModelPair, prompts: Sequence[str], shown: int = 0, draft_length: int | None = 5, **options
    ):
        """shown: the displayed row. draft_length: None is the default policy. options: as in `generate`."""
        self.pair, self.prompts, self.shown = pair, list(prompts), shown
        self.options = {"trace": "tokens", **options}
        self.draft_length = draft_length
        self.seconds = {"regular": 0.0, "speculative": 0.0}
        self.regular: Generation | None = None
        self.speculative: Generation | None = None
        self._text: dict[str, str] = {"regular": "", "speculative": ""}

    def run(self) -> Race:
        """Decode twice after a short warm-up, with a live picture in a notebook. Return self."""
        generate(self.pair, self.prompts, draft_length=self.draft_length, **self.options | {"max_new_tokens": 8})
        view = _LiveHtml(self)
        self.regular = self._decode("regular", 0, view)
        self.speculative = self._decode("speculative", self.draft_length, view)
        view.refresh(final=True)
        return self

    @property
    def identical(self) -> int:
        """Number of rows with the same tokens in both runs."""
        pairs = zip(self.regular.sequences, self.speculative.sequences, strict=True)
        return sum(a.tolist() == b.tolist() for a, b in pairs)

    def _decode(self, name: str, draft_length: int, view: _LiveHtml) -> Generation:
        shown_tokens: list[int] = []
        drawing = 0.0  # seconds of drawing, excluded from the clock
        started = time.perf_counter()

        def on_step(event) -> None:
            nonlocal drawing
            if self.shown in event.rows:
                shown_tokens.extend(event.new_tokens[event.rows.index(self.shown)])
            now = time.perf_counter()
            self.seconds[name] = now - started - drawing
            if view.due():
                kinds = ["regular"] * len(shown_tokens)
                self._text[name] = plots.coloured_text(shown_tokens, kinds, self.pair.tokenizer)
                view.refresh()
            drawing += time.perf_counter() - now

        out = generate(self.pair, self.prompts, draft_length=draft_length, on_step=on_step, **self.options)
        tokens = out.trace.tokens.query("row == @self.shown and kind != 'rejected'").sort_values("position")
        self._text[name] = plots.coloured_text(tokens.token.tolist(), tokens.kind.tolist(), self.pair.tokenizer)
        return out

    def _repr_html_(self) -> str:
        regular, speculative = (self._column(name) for name in ("regular", "speculative"))
        columns = plots.SIDE_BY_SIDE.format(regular + speculative)
        return f"{self._headline()}{columns}<p style='font-size:90%'>{plots.legend()}</p>"

    def _headline(self) -> str:
        if self.speculative is None:
            return "<b>Decoding …</b>"
        ratio = self.seconds["regular"] / self.seconds["speculative"]
        return (
            f"<b>{self.identical} of {len(self.regular.sequences)} rows have identical tokens; "
            f"speculative decoding was {ratio:.2f}× as fast in this run.</b>"
            + (LAUNCHED if self.pair.device.type == "cuda" else "")
        )

    def _column(self, name: str) -> str:
        detail = "one token per row and pass"
        if name == "speculative":
            chosen = "the default policy's number of" if self.draft_length is None else f"{self.draft_length}"
            detail = f"{chosen} draft tokens per row and pass"
            if self.speculative is not None:
                detail += f", {self.speculative.trace.summary()['tokens_per_step']:.2f} tokens per step"
        text = f"<p style='margin:4px 0;font-size:90%'>{detail}</p>{self._text[name]}"
        return plots.COLUMN.format(f"{name} decoding · {self.seconds[name]:.2f} s", text)


class _LiveHtml:
    """HTML output with at most ten redraws per second. Outside a notebook it does nothing."""

    def __init__(self, content: Race):
        self._content, self._last = content, 0.0
        in_notebook = hasattr(get_ipython(), "kernel")
        self._handle = display(content, display_id=True) if in_notebook else None

    def due(self) -> bool:
        return self._handle is not None and time.perf_counter() - self._last > 0.1

    def refresh(self, final: bool = False) -> None:
        if self._handle is not None and (final or self.due()):
            self._handle.update(self._content)
            self._last = time.perf_counter()


Runs = Mapping[int, tuple[Generation, dict[str, float]]]  # by draft length: a run, and its row of `lengths_table`


def runs_by_length(
    pair: ModelPair, prompts: Sequence[str], lengths: Iterable[int], *, max_new_tokens: int, seed: int = 0
) -> Runs:
    """Return a run for regular decoding (0) and for each of the draft lengths, with its speed."""
    runs = {}
    for k in sorted({0, *lengths}):
        with KeptSession(pair, len(prompts), draft_length=k) as decode:
            out = decode.settled(prompts, max_new_tokens=max_new_tokens, seed=seed)
        summary = out.trace.summary()
        found = {"tokens per step": summary["tokens_per_step"], "α": summary["alpha"]}
        runs[k] = out, found | {"tokens/s": summary["tokens"] / decode.seconds}
    return runs


def draft_length_slider(runs: Runs, value: int) -> widgets.VBox:
    """Return a slider over the draft lengths of the runs, above a sentence and the acceptance raster of the run."""

    def draw(k: int) -> tuple[str, go.Figure]:
        out, found = runs[k]
        pairs = zip(runs[0][0].sequences, out.sequences, strict=True)
        same = all(a.tolist() == b.tolist() for a, b in pairs)
        sentence = (
            f"<b>k = {k}</b>: {found['tokens per step']:.2f} tokens per step, "
            + (f"α = {found['α']:.2f}, " if k else "nothing drafted, ")
            + f"{found['tokens/s']:,.0f} tokens/s · "
            + ("same text as regular decoding ✓" if same else "the text differs from regular decoding ✗")
        )
        return sentence, plots.acceptance_raster(out.trace)

    return live(draw, k=widgets.SelectionSlider(options=list(runs), value=value, description="draft length"))


def lengths_table(runs: Runs) -> pd.DataFrame:
    """Return tokens per step, alpha and tokens/s per draft length."""
    lines = {k: found for k, (_, found) in runs.items()}
    return pd.DataFrame.from_dict(lines, orient="index").rename_axis("draft length")
