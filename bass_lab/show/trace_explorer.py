"""Interactive view of one trace: the raster, and the tokens of one step."""

from __future__ import annotations

from collections.abc import Sequence

from IPython.display import display
from transformers import PreTrainedTokenizerBase

from bass_core.loop.trace import Trace
from bass_lab.show import plots, token_views
from bass_lab.show.live_figures import busy, live_figure, redraw, stacked, widgets

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
        self.headline, self.reason, self.text = widgets.HTML(), widgets.HTML(), widgets.HTML()
        self.raster, self.bars = live_figure(), live_figure()
        self.controls = _step_controls()
        self._moving = False
        for name in ("row", "step"):
            self.controls[name].observe(self._moved, names="value")
        self.widget = self._arranged()

    def _arranged(self) -> widgets.VBox:
        choice = widgets.Box([self.controls[name] for name in ("row", "step", "play")], layout=WRAPPED)
        magnifier = widgets.VBox([self.bars, self.reason], layout=_HALF)
        below = widgets.Box(
            [magnifier, widgets.VBox([self.text], layout=_HALF)], layout=WRAPPED | {"align_items": "flex-start"}
        )
        key = widgets.HTML(f'<div style="font-size:90%;line-height:1.6">{token_views.legend()}</div>')
        return stacked(self.headline, self.raster, choice, below, key)

    def show(self, trace: Trace, prompts: Sequence[str] = ()) -> None:
        """Draw another trace, with the same row and step if possible. prompts: one text per row, or empty. Raises
        ValueError if the trace has no tokens."""
        _ = trace.tokens  # raises ValueError before anything changes
        self._drawn = plots.acceptance_raster(trace).update_layout(dragmode=False)
        self.headline.value = token_views.headline(trace)
        self.trace, self.prompts = trace, list(prompts)
        self.choose(self.controls["row"].value, self.controls["step"].value)
        for drawn in self.raster.data:  # cells with draft tokens, and cells without
            drawn.on_click(self._clicked)

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
            with busy(self.widget):
                self.choose(self.controls["row"].value, self.controls["step"].value)

    def _clicked(self, _, points, __) -> None:
        if points.ys:
            with busy(self.widget):
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

    def _ipython_display_(self) -> None:
        display(self.widget)


def _step_controls() -> dict[str, widgets.Widget]:
    common = {"style": {"description_width": "40px"}, "continuous_update": False}
    row, step = (
        widgets.IntSlider(0, 0, 0, description="row", **common),
        widgets.IntSlider(1, 1, 1, description="step", **common),
    )
    play = widgets.Play(value=1, min=1, max=1, interval=1000, show_repeat=False)
    widgets.link((play, "value"), (step, "value"))
    return {"row": row, "step": step, "play": play}
