"""Acceptance explorer: settings above a view of a run. A changed setting decodes again."""

from __future__ import annotations

import html
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pandas as pd
from IPython.display import display
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from bass_core import checks
from bass_core.drafters import Drafter
from bass_core.generation import Generation, generate
from bass_core.loading.model_pair import ModelPair
from bass_core.loop.trace import Trace
from bass_core.policies.protocol import BassHeuristic, DraftLengthPolicy, FixedLength
from bass_core.prompts import token_ids
from bass_lab.pairs import drafters_for
from bass_lab.provenance import describe_run
from bass_lab.show.live_figures import busy, stacked, widgets
from bass_lab.show.looks import LOOKS
from bass_lab.show.trace_explorer import WRAPPED, TraceExplorer
from bass_lab.study.published_policies import HuggingFaceHeuristic
from bass_lab.texts import prompt_sets

POLICIES: dict[str, Callable[[int], DraftLengthPolicy | None]] = {
    "fixed": FixedLength,
    "default": lambda k: None,  # uses costs and acceptance, if the pair's costs are known
    "Algorithm 1": lambda k: BassHeuristic(),  # ignores k, uses the paper's constants
    "transformers": lambda k: HuggingFaceHeuristic(),
}
RULES = ("token", "block", "coupled")
LIVE_BELOW = 50_000_000  # parameters; smaller targets decode again at every change


class AcceptanceExplorer:
    """Settings of a run above a `TraceExplorer` (`view`) of the accepted tokens in each row.

    controls: "drafter", "draft_length", "batch_size", "temperature", "policy", "verification", "prompt_set", "seed",
    the controls of `view`, and "run" if `live` is False. same_text: True if the text equals regular decoding, or None
    if the texts may differ (temperature > 0 without coupled verification). message: error of `generate`.
    """

    def __init__(
        self,
        pair: ModelPair,
        *,
        batch_size: int = 8,
        draft_length: int = 5,
        temperature: float = 0.0,
        policy: str = "fixed",
        verification: str = "token",
        drafter: str | None = None,
        prompt_set: str = "mini",
        seed: int = 0,
        max_new_tokens: int = 64,
        prompts: Mapping[str, Sequence[prompt_sets.Prompt]] | None = None,
        drafters: Mapping[str, PreTrainedModel | Drafter] | None = None,
        live: bool | None = None,
        **options,
    ):
        """prompts: by name of the set; by default both sets of the repository, and `prompt_set` if that is a file.
        drafters: by name; default `drafters_for(pair)`. drafter: default the first. live: decode at every change; by
        default if the target is small. options: as in `generate`. Raises ValueError or TypeError for invalid settings.
        """
        self.pair = pair
        self.drafters = drafters_for(pair) if drafters is None else dict(drafters)
        if prompts is None:
            prompts, prompt_set = prompt_sets.beside_ours(prompt_set), prompt_sets.label(prompt_set)
        self.prompts = dict(prompts)
        self.options = {"max_new_tokens": max_new_tokens, **options}
        self.live = sum(p.numel() for p in pair.target.parameters()) < LIVE_BELOW if live is None else live
        self.out: Generation | None = None
        self.same_text: bool | None = None
        self._decoded: dict[str, Generation] = {}  # by settings
        self.view = TraceExplorer(pair.tokenizer)
        self.raster = self.view.raster
        self.message, self.badge = widgets.HTML(), widgets.HTML()
        values = {"batch_size": batch_size, "draft_length": draft_length, "temperature": temperature, "policy": policy}
        values |= {"verification": verification, "prompt_set": prompt_set, "seed": seed}
        values["drafter"] = next(iter(self.drafters)) if drafter is None else drafter
        settings = _settings(values, {"prompt_set": self.prompts, "drafter": self.drafters}, self.live)
        self.controls = settings | self.view.controls
        above = widgets.Box(list(settings.values()), layout=WRAPPED)
        self.widget = stacked(above, self.message, self.badge, self.view.widget)
        self._setting = False
        for name, control in settings.items():
            if name == "run":
                control.on_click(lambda _: self.run())
            else:
                control.observe(self._changed, names="value")
        self._changed(None)

    @staticmethod
    def replay(
        trace: Trace | str | Path, tokenizer: PreTrainedTokenizerBase, prompts: Sequence[str] = ()
    ) -> TraceExplorer:
        """Return the same views of a recorded trace (or its file) with tokens. prompts: of the trace's rows."""
        view = TraceExplorer(tokenizer)
        view.show(trace if isinstance(trace, Trace) else Trace.load(trace), prompts)
        return view

    def _changed(self, _) -> None:
        self.controls["draft_length"].disabled = self.controls["policy"].value != "fixed"
        if self._setting:
            return
        if self.live:
            self.run()
        else:
            self.message.value = "Press <b>Run</b> to decode with these settings."

    def run(self, **settings) -> None:
        """Set these controls, decode and show the run. After an error, `message` shows it and the old view stays."""
        self._setting = True  # several controls change, but only one run follows
        for name, value in settings.items():
            self.controls[name].value = value
        self._setting = False
        try:
            with busy(self.widget):
                self._run()
            self.message.value = ""
        except (ValueError, TypeError, ArithmeticError, RuntimeError) as error:  # as `generate`; memory, too
            self.message.value = (
                f'<span style="color:{LOOKS["recovered"].colour}"><b>Not decoded:</b> {html.escape(str(error))} '
                f"({type(error).__name__}). The views below show the previous run.</span>"
            )

    def _run(self) -> None:
        names = ("temperature", "verification", "seed")
        texts, options = self._texts(), {name: self.controls[name].value for name in names} | self.options
        if self.out is None:  # probing and warm-up happen once and are not timed
            generate(self.pair, texts, **options | {"max_new_tokens": 4})
        self.out = self._of(
            texts, options, *(self.controls[name].value for name in ("drafter", "policy", "draft_length"))
        )
        samples = len(self.out.sequences) // len(texts)
        written = [
            text if isinstance(text, str) else self.pair.tokenizer.decode(ids)
            for text, ids in zip(texts, token_ids(self.pair, texts), strict=True)
        ]
        self.view.show(self.out.trace, [text for text in written for _ in range(samples)])
        self._compare(texts, options)

    def _of(self, texts: Sequence[str], options: dict, drafter: str, policy: str, k: int) -> Generation:
        """Return the run of these settings. A second visit to the same settings decodes nothing."""
        key = repr((texts, options, drafter, policy, k))
        if key not in self._decoded:
            pair, chosen = replace(self.pair, draft=self.drafters[drafter]), POLICIES[policy](k)
            self._decoded[key] = generate(pair, texts, draft_length=chosen, trace="tokens", **options)
        return self._decoded[key]

    def _texts(self) -> list[str]:
        name, count = self.controls["prompt_set"].value, self.controls["batch_size"].value
        if count > len(self.prompts[name]):
            raise ValueError(f"the prompt set {name!r} has {len(self.prompts[name])} prompts; batch size is {count}")
        return list(self.prompts[name][:count])

    def _compare(self, texts: Sequence[str], options: dict) -> None:
        """Compare the text with regular decoding, and set `same_text`."""
        if options["temperature"] > 0 and options["verification"] != "coupled":
            self.same_text = None
            about = f"sampled, {options['verification']} verification: distribution of regular decoding, other text"
            self.badge.value = _badge("–", "regular", about)
            return
        regular = self._of(texts, options, next(iter(self.drafters)), "fixed", 0)
        pairs = zip(regular.sequences, self.out.sequences, strict=True)
        equal = [wanted.tolist() == found.tolist() for wanted, found in pairs]
        self.same_text = all(equal)
        verdict = "same text as regular decoding" if self.same_text else "the text differs from regular decoding"
        about = f"{verdict}: {sum(equal)} of {len(equal)} rows are equal, token by token"
        self.badge.value = _badge(*("✓", "bonus") if self.same_text else ("✗", "recovered"), about)

    def record(self) -> dict:
        """Return the run as a record of kind "acceptance" (docs/RECORDS.md): settings and rates, without speed."""
        summary = self.out.trace.summary()
        fixed = self.controls["policy"].value == "fixed"
        rates = {name: summary[name] if summary["alpha"] >= 0 else None for name in ("alpha", "acceptance_rate")}
        names = ("prompt_set", "drafter", "policy", "verification", "temperature", "seed")
        return {
            "schema": "acceptance",
            "method": "batched" if summary["alpha"] >= 0 else "regular",
            **{name: self.controls[name].value for name in names},
            "batch": self.controls["batch_size"].value,
            "k": self.controls["draft_length"].value if fixed else None,
            "max_new_tokens": self.options["max_new_tokens"],
            **rates,
            "tokens_per_step": summary["tokens_per_step"],
            "same_text": self.same_text,
            **describe_run(replace(self.pair, draft=self.drafters[self.controls["drafter"].value])),
        }

    def _ipython_display_(self) -> None:
        display(self.widget)


def acceptance_table(
    pair: ModelPair, prompts: Mapping[str, Sequence[str]], settings: Sequence[Mapping], **options
) -> pd.DataFrame:
    """Return α, acceptance rate and tokens per step for every prompt set and setting (options of `generate`)."""
    lines = []
    for name, texts in prompts.items():
        for setting in settings:
            found = generate(pair, texts, **options | dict(setting)).trace.summary()
            line = {"prompt set": name} | {option.replace("_", " "): value for option, value in setting.items()}
            line |= {"α": found["alpha"], "acceptance rate": found["acceptance_rate"]}
            lines.append(line | {"tokens per step": found["tokens_per_step"]})
    return pd.DataFrame(lines)


def _settings(values: dict, chosen: Mapping[str, Iterable[str]], live: bool) -> dict[str, widgets.Widget]:
    """Return the controls of a run. chosen: options by control. Raises the errors of `AcceptanceExplorer`."""
    k = checks.integer("draft_length", values["draft_length"])
    batch_size = checks.integer("batch_size", values["batch_size"], least=1)
    seed = checks.integer("seed", values["seed"], least=None)
    temperature = values["temperature"]
    if not temperature >= 0:
        raise ValueError(f"temperature must be >= 0, got {temperature!r}")
    common = {"style": {"description_width": "85px"}}
    slider = common | {"continuous_update": False}
    controls = {
        "prompt_set": widgets.Dropdown(options=list(chosen["prompt_set"]), description="prompts", **common),
        "drafter": widgets.Dropdown(options=list(chosen["drafter"]), description="drafter", **common),
        "policy": widgets.Dropdown(options=list(POLICIES), description="policy", **common),
        "verification": widgets.Dropdown(options=RULES, description="verification", **common),
        "draft_length": widgets.IntSlider(k, 0, max(12, k), description="draft length", **slider),
        "batch_size": widgets.IntSlider(batch_size, 1, max(16, batch_size), description="batch size", **slider),
        "temperature": widgets.FloatSlider(
            temperature, min=0, max=max(1.5, temperature), step=0.1, description="temperature", **slider
        ),
        "seed": widgets.IntText(seed, description="seed", **slider),
    }
    for name in ("prompt_set", "drafter", "policy", "verification"):
        controls[name].value = checks.one_of(name, values[name], controls[name].options)
    return (
        controls if live else controls | {"run": widgets.Button(description="Run", button_style="primary", icon="play")}
    )


def _badge(symbol: str, kind: str, text: str) -> str:
    style = f"color:{LOOKS[kind].colour};border:2px solid;border-radius:6px;padding:1px 8px"
    return f'<span style="{style}"><b>{symbol} {text}</b></span>'
