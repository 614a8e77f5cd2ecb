"""Measure the embedded encoder-decoder pair and write its data card.

`python -m bass_lab.pair.encoder_decoder_card` measures the results of `encoder_decoder.train` in float32 with fixed
seeds, and copies the models to the assets.
"""

from __future__ import annotations

from pathlib import Path

from bass_core.loading.model_pair import ASSETS, READER, load_pair
from bass_lab.evaluation import load_problems
from bass_lab.pair import encoder_decoder
from bass_lab.pair.data_card import acceptance, continued, publish, share_passed, written
from bass_lab.texts import grammar
from bass_lab.texts.prompt_sets import prompt_set

HELD_OUT = 1000  # functions for the loss

TEMPLATE = Path(__file__).parents[1] / "assets" / "encoder_decoder_card_template.md"


def measure(folder: Path) -> dict:
    """Return figures of the pair in `folder`: pass@1 and acceptance on the mini set, held-out losses."""
    pair = load_pair(folder / "target", folder / "draft", dtype="float32")
    problems = load_problems()
    prompts = [problem.prompt for problem in problems]
    found = {
        f"pass@1, temperature {temperature}": share_passed(problems, continued(pair, prompts, temperature).texts)
        for temperature in (0.0, 0.2)
    }
    found |= acceptance(pair, prompt_set("mini"))
    functions = grammar.functions(HELD_OUT, 1, held_out=True)
    return found | {"held_out": encoder_decoder.held_out_losses(pair, functions)}


def card(figures: dict, trained: dict, recipe: encoder_decoder.ReaderRecipe) -> str:
    """Return the card's text."""

    def table(*rows: tuple) -> str:
        return "\n".join(f"| {first} | " + " | ".join(map(written, values)) + " |" for first, *values in rows)

    def shape(sizes: dict) -> str:
        return f"{sizes['encoder_layers']} + {sizes['decoder_layers']} × {sizes['d_model']}"

    stages = {name: trained[f"{name} training"] for name in ("target", "draft", "alignment")}
    keys = ("tokens", "steps", "seconds", "first_loss", "last_loss")
    shown = {name: value for name, value in figures.items() if name != "held_out"}
    return TEMPLATE.read_text(encoding="utf-8").format(
        seed=trained["seed"],
        machine=trained["machine"],
        minutes=sum(stage["seconds"] for stage in stages.values()) / 60,
        functions=recipe.functions,
        temperatures=recipe.aligning_temperatures,
        texts=recipe.target_texts,
        problems=len(load_problems()),
        models=table(
            ("", "target", "draft"),
            ("---", "---:", "---:"),
            ("parameters", trained["target"]["parameters"], trained["draft"]["parameters"]),
            ("encoder + decoder layers × width", shape(recipe.target), shape(recipe.draft)),
            ("weights, MB (bfloat16)", trained["target"]["megabytes"], trained["draft"]["megabytes"]),
            ("held-out functions, nats per token", figures["held_out"]["target"], figures["held_out"]["draft"]),
        ),
        stages=table(
            ("stage", "tokens", "steps", "seconds", "loss, first 10 steps", "loss, last 50 steps"),
            ("---", *["---:"] * 5),
            *((name, *(stage[key] for key in keys)) for name, stage in stages.items()),
        ),
        figures=table(("figure", "value"), ("---", "---:"), *shown.items()),
    )


def measured(folder: Path, trained: dict) -> tuple[dict, str]:
    """Return the figures of the trained models, and the card."""
    figures = measure(folder)
    return figures, card(figures, trained, encoder_decoder.ReaderRecipe(seed=trained["seed"]))


if __name__ == "__main__":
    publish(encoder_decoder.WORK / "trained", ASSETS / READER, ("target", "draft"), measured, __doc__.splitlines()[0])
