"""Measure the embedded models and write their data card: `python -m bass_lab.pair.data_card`.

Measures the results of `training.train_pair` in float32 with fixed seeds, and copies the models to the assets.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from transformers import PreTrainedModel

from bass_core.environment import write_whole
from bass_core.generation import Generation, generate
from bass_core.loading.model_pair import ASSETS, ModelPair, load_pair
from bass_lab.evaluation import Problem, grade_all, load_problems
from bass_lab.pair import training
from bass_lab.pair.feature_head import STEP_WEIGHTS
from bass_lab.pair.fitting import next_token_loss, say
from bass_lab.pair.windows import Windows
from bass_lab.texts import corpus
from bass_lab.texts.prompt_sets import PROMPT_SETS, prompt_set

TEMPLATE = Path(__file__).parents[1] / "assets" / "data_card_template.md"
SHIPPED = ("target", *training.DRAFTS, "feature_head", "unaligned_draft")
STAGES = {"target": "target", "drafts": "drafts, before alignment"}  # stages of training and their titles
STAGES |= {"alignment": "alignment", "feature_head": "feature head"}
DRAFT_LENGTH, TEMPERATURE, MAX_NEW_TOKENS, BATCH = 5, 0.2, 128, 32


def measure(folder: Path, recipe: training.Recipe) -> dict:
    """Return figures of the models in `folder`: pass@1 on the mini set, acceptance on both sets, losses in nats."""
    pairs = {name: load_pair(folder / "target", folder / name, dtype="float32") for name in _drafters(recipe)}
    report = {
        name: {prompts: acceptance(pair, prompt_set(prompts)) for prompts in PROMPT_SETS}
        for name, pair in pairs.items()
    }
    pair, problems = pairs["draft"], load_problems()
    prompts = [problem.prompt for problem in problems]
    report["pass_at_1"] = {
        f"temperature {temperature}": share_passed(problems, continued(pair, prompts, temperature).texts)
        for temperature in (0.0, TEMPERATURE)
    }
    held_out = {
        "generated": corpus.generated_functions(1000, seed=1, held_out=True),
        "library": corpus.library_functions(held_out=True),
    }
    for kind, texts in held_out.items():
        windows = Windows(texts, pair.tokenizer)
        report[f"held_out_loss_{kind}"] = {
            name: held_out_loss(pair.target if name == "target" else pairs[name].draft, windows)
            for name in ("target", *recipe.drafts)
        }
    return report


def _drafters(recipe: training.Recipe) -> dict[str, str]:
    """Return all measured drafters and their titles."""
    titles = {}
    for name in recipe.drafts:
        titles |= {f"unaligned_{name}": f"{_title(name)}, before alignment", name: _title(name)}
    return titles | {"draft": "**draft**", "feature_head": "feature head"}


def _title(name: str) -> str:
    return name.replace("_", " ")


def share_passed(problems: Sequence[Problem], completions: Sequence[str]) -> float:
    """Return the share of problems with a passing completion: pass@1 with a single sample per problem."""
    grades = grade_all(list(zip(problems, completions, strict=True)))
    return sum(grade.passed for grade in grades) / len(grades)


def acceptance(pair: ModelPair, prompts: Sequence[str]) -> dict[str, float]:
    """Return α, acceptance rate and tokens per step at k = 5, temperature 0.2, to each text's end or 128 tokens."""
    out = continued(pair, prompts, TEMPERATURE)
    summary = out.trace.summary()
    ended = sum(reason == "eos" for reason in out.finish_reasons) / len(prompts)
    tokens = sum(map(len, out.sequences)) / len(prompts)
    names = ("alpha", "acceptance_rate", "tokens_per_step")
    return {name: summary[name] for name in names} | {"ended": ended, "tokens": tokens}


def continued(pair: ModelPair, prompts: Sequence[str], temperature: float) -> Generation:
    """Generate a text for each prompt, to the text's end or 128 tokens."""
    options = {"max_new_tokens": MAX_NEW_TOKENS, "draft_length": DRAFT_LENGTH, "max_batch_size": BATCH}
    return generate(pair, prompts, temperature=temperature, **options)


@torch.no_grad()
def held_out_loss(model: PreTrainedModel, windows: Windows) -> float:
    """Return the next-token loss in nats on 64 windows of 256 tokens."""
    generator = torch.Generator().manual_seed(1)
    batches = (windows.take(8, 256, generator).to(model.device) for _ in range(8))
    return sum(next_token_loss(model, batch).item() for batch in batches) / 8


def data_card(figures: dict, trained: dict, recipe: training.Recipe) -> str:
    """Return the card's text, from the results of `measure` and the report of the training."""

    def row(title: str, *values: object) -> str:
        return f"| {title} | " + " | ".join(map(written, values)) + " |"

    columns = ("target", *recipe.drafts, "feature_head")
    models = [
        row("", *map(_title, columns)),
        row("---", *("---:" for _ in columns)),
        row("parameters", *(trained[name]["parameters"] for name in columns)),
        row("layers × width", *(_shape(recipe, name) for name in columns)),
        row("weights, MB (bfloat16)", *(trained[name]["megabytes"] for name in columns)),
        *(
            row(f"held-out {kind} functions, nats per token", *figures[f"held_out_loss_{kind}"].values(), "")
            for kind in ("generated", "library")
        ),
    ]
    stages = [
        row(title, *(trained[stage][key] for key in ("tokens", "steps", "seconds", "first_loss", "last_loss")))
        for stage, title in STAGES.items()
    ]
    names = ("alpha", "acceptance_rate", "tokens_per_step")
    accepted = [
        row(title, *(figures[name][prompts][key] for prompts in PROMPT_SETS for key in names))
        for name, title in _drafters(recipe).items()
    ]
    return TEMPLATE.read_text(encoding="utf-8").format(
        recipe=recipe,
        trained=trained,
        models="\n".join(models),
        stages="\n".join(stages),
        accepted="\n".join(accepted),
        passed="\n".join(row(name, f"{share:.0%}") for name, share in figures["pass_at_1"].items()),
        ended="\n".join(
            row(name, *(figures["draft"][name][key] for key in ("ended", "tokens"))) for name in PROMPT_SETS
        ),
        share=recipe.generated_share,
        steps=len(STEP_WEIGHTS),
        minutes=sum(trained[stage]["seconds"] for stage in STAGES) / 60,
    )


def _shape(recipe: training.Recipe, name: str) -> str:
    sizes = {"target": recipe.target, "feature_head": recipe.target | {"num_hidden_layers": 1}, **recipe.drafts}[name]
    return f"{sizes['num_hidden_layers']} × {sizes['hidden_size']}"


def written(value: object) -> str:
    """Format a value for a table."""
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3f}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def measured(folder: Path, trained: dict) -> tuple[dict, str]:
    """Return the figures of the trained models, and the card."""
    recipe = training.Recipe(seed=trained["seed"])
    figures = measure(folder, recipe)
    return figures, data_card(figures, trained, recipe)


def publish(
    trained: Path, output: Path, names: Sequence[str], measured: Callable[[Path, dict], tuple[dict, str]], about: str
) -> None:
    """Run a command that measures the models in `trained` and copies models and card to `output`."""
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--trained", type=Path, default=trained, help="folder with the results of the training")
    parser.add_argument("--output", type=Path, default=output, help="folder for models and card")
    options = parser.parse_args()
    report = json.loads((options.trained / "training.json").read_text(encoding="utf-8"))
    figures, card = measured(options.trained, report)
    for name in names:
        shutil.rmtree(options.output / name, ignore_errors=True)
        shutil.copytree(options.trained / name, options.output / name)
    write_whole(options.output / "DATA_CARD.md", card)
    say(json.dumps(figures, indent=1))


if __name__ == "__main__":
    publish(training.WORK / "trained", ASSETS, SHIPPED, measured, __doc__.splitlines()[0])
