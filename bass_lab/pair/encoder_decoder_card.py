"""What the embedded encoder-decoder pair can do, measured, and its card.

`python -m bass_lab.pair.encoder_decoder_card` takes what `encoder_decoder.train` wrote, measures it in float32 with
fixed seeds, and copies it to the assets.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

from bass_core.environment import write_whole
from bass_core.loading.model_pair import ASSETS, READER, load_pair
from bass_lab.evaluation import load_problems
from bass_lab.pair import encoder_decoder
from bass_lab.pair.data_card import acceptance, continued, share_passed, written
from bass_lab.pair.fitting import say
from bass_lab.texts import grammar
from bass_lab.texts.prompt_sets import prompt_set

HELD_OUT = 1000  # functions, for the loss

CARD = """# The embedded encoder-decoder pair

Two Pegasus models of the smallest kind (`load_pair("encoder_decoder")`): they read the signature and the docstring of
a Python function and write its body. Made by `make encoder-decoder-pair` (seed {seed}) in {minutes:.0f} minutes of
training on {machine}, other work beside it.

Trained on {functions:,} functions of `bass_lab/texts/grammar.py` and nothing else, with the tokenizer of the
decoder-only pair; sources are what `tokenizer(text)` gives, without an end-of-text token. One *composition* in ten is
held out, and the mini set is made of such; of functions that are templates one signature with its docstring in ten,
most of which occur in training under another name. The draft learned the target's probabilities at temperatures
{temperatures}, one time in three on the corpus, else on {texts:,} texts that the target had written.

{models}

{stages}

Losses are next-token losses in nats; of the alignment KL(target ‖ draft), mean over its temperatures.

On the mini set ({problems} sources of held-out compositions), float32, k = 5, to the end of each text or 128 tokens
(alpha and the acceptance rate count drafts that are verified behind it, too):

{figures}
"""


def measure(folder: Path) -> dict:
    """Figures of the trained pair in `folder`: pass@1 and acceptance on the mini set, held-out losses."""
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
    """The card's text."""

    def table(*rows: tuple) -> str:
        return "\n".join(f"| {first} | " + " | ".join(map(written, values)) + " |" for first, *values in rows)

    def shape(sizes: dict) -> str:
        return f"{sizes['encoder_layers']} + {sizes['decoder_layers']} × {sizes['d_model']}"

    stages = {name: trained[f"{name} training"] for name in ("target", "draft", "alignment")}
    keys = ("tokens", "steps", "seconds", "first_loss", "last_loss")
    shown = {name: value for name, value in figures.items() if name != "held_out"}
    return CARD.format(
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


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bass_lab.pair.encoder_decoder_card", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--trained", type=Path, default=encoder_decoder.WORK / "trained", help="what training wrote")
    parser.add_argument("--output", type=Path, default=ASSETS / READER, help="where models and card go")
    options = parser.parse_args()
    trained = json.loads((options.trained / "training.json").read_text(encoding="utf-8"))
    figures = measure(options.trained)
    text = card(figures, trained, encoder_decoder.ReaderRecipe(seed=trained["seed"]))
    for name in ("target", "draft"):
        shutil.rmtree(options.output / name, ignore_errors=True)
        shutil.copytree(options.trained / name, options.output / name)
    write_whole(options.output / "DATA_CARD.md", text)
    say(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
