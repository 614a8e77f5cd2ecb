"""Interactive view of one trace: the raster, and the tokens of one step."""

from __future__ import annotations

from collections.abc import Sequence

from ipywidgets import HTML, Box, IntSlider, Play, VBox, Widget, link
from transformers import PreTrainedTokenizerBase

from bass_core.loop.trace import Trace
from bass_lab.show import live_figures, plots, token_views
from bass_lab.show.live_figures import live_figure, redraw, stacked

WRAPPED = {"display": "flex", "flex_flow": "row wrap", "align_items": "center"}
_HALF = {"flex": "1 1 420px", "min_width": "0"}


class TraceExplorer:
    """Raster of a trace with tokens, controls for row and step, the tokens of the chosen step, and the row's text.

    controls: "row", "step" and "play". A click on a cell of `raster` sets row and step. `raster` and `bars` are
    FigureWidgets; `headline`, `reason` and `text` are HTML; `widget` contains everything.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        self.tokenizer = tokenizer
        self.trace: Trace | None = None  # None until `show`
        self.prompts: list[str] = []
        self.headline, self.reason, self.text = HTML(), HTML(), HTML()
        self.raster, self.bars = live_figure(), live_figure()
        self.controls = _step_controls()
        self._moving = False
        for name in ("row", "step"):
            self.controls[name].observe(self._moved, names="value")
        self.widget = self._arranged()

    def _arranged(self) -> VBox:
        choice = Box([self.controls[name] for name in ("row", "step", "play")], layout=WRAPPED)
        magnifier = VBox([self.bars, self.reason], layout=_HALF)
        below = Box([magnifier, VBox([self.text], layout=_HALF)], layout=WRAPPED | {"align_items": "flex-start"})
        key = HTML(f'<div style="font-size:90%;line-height:1.6">{token_views.legend()}</div>')
        return stacked(self.headline, self.raster, choice, below, key)

    def show(self, trace: Trace, prompts: Sequence[str] = ()) -> None:
        """Draw another trace, with the same row and step if possible. prompts: one text per row, or empty. Raises
        ValueError if the trace has no tokens."""
        _ = trace.tokens  # raises ValueError before anything changes
        self._drawn = plots.acceptance_raster(trace).update_layout(dragmode=False)
        self.headline.value = token_views.headline(trace)
        self.trace, self.prompts = trace, list(prompts)
        self.choose(self.controls["row"].value, self.controls["step"].value)
        self.raster.data[0].on_click(self._clicked)

    def choose(self, row: int, nth: int) -> None:
        """Show a row's step, or the nearest existing step."""
        steps = self.trace.steps.query("kind == 'decode'").groupby("row").size()
        last_row = int(self.trace.steps.row.max())
        row = min(row, last_row)
        last = int(steps.get(row, 1))
        self._moving = True  # two controls change, but the figure is drawn once
        self.controls["row"].max = last_row
        self.controls["row"].value = row
        self.controls["step"].max = self.controls["play"].max = last
        self.controls["step"].value = min(nth, last)
        self._moving = False
        self._draw_step()

    def _moved(self, _) -> None:
        if self.trace is not None and not self._moving:
            self.choose(self.controls["row"].value, self.controls["step"].value)

    def _clicked(self, _, points, __) -> None:
        if points.ys:
            self.choose(int(points.ys[0]), int(points.xs[0]))

    def _draw_step(self) -> None:
        row, nth = self.controls["row"].value, self.controls["step"].value
        redraw(self.raster, self._drawn.update_layout(shapes=[token_views.marked_cell(row, nth)]))
        redraw(self.bars, token_views.step_figure(self.trace, row, nth, self.tokenizer))
        self.reason.value, self.text.value = self._words()

    def _words(self) -> tuple[str, str]:
        row, nth = self.controls["row"].value, self.controls["step"].value
        prompt = self.prompts[row] if self.prompts else ""
        tokens = token_views.step_html(self.trace, row, nth, self.tokenizer, prompt)
        because = token_views.why(self.trace, row, nth, self.tokenizer)
        reason = f'<div style="line-height:1.5">{tokens}{because}</div>'
        text = token_views.row_html(self.trace, row, self.tokenizer, prompt, nth)
        return reason, f'<b>Row {row}, tokens of step {nth} marked</b><div style="line-height:1.5">{text}</div>'

    def static(self) -> tuple:
        """Return the current view without widgets: headline, raster, the step's tokens, and texts."""
        if self.trace is None:
            raise ValueError("nothing was decoded yet; press Run or call run()")
        return live_figures.static(self.headline, self.raster, self.bars, "<br>".join(self._words()))

    def _repr_mimebundle_(self, **options):
        return self.widget._repr_mimebundle_(**options)


def _step_controls() -> dict[str, Widget]:
    common = {"style": {"description_width": "40px"}, "layout": {"width": "300px"}, "continuous_update": False}
    row, step = IntSlider(0, 0, 0, description="row", **common), IntSlider(1, 1, 1, description="step", **common)
    play = Play(value=1, min=1, max=1, interval=1000, show_repeat=False)
    link((play, "value"), (step, "value"))
    return {"row": row, "step": step, "play": play}
