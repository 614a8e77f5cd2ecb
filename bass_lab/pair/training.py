"""Train the embedded pair from scratch on two CPU cores in two hours: `make embedded-pair`.

For models this small, the number of layers decides the cost of a pass. A draft of one wide layer is therefore about ten
times cheaper than the deep target. Two deeper, narrower drafts of equal size allow a comparison. A feature head drafts
from the target's hidden states.

Each stage resumes after an interruption: train the tokenizer; train target and drafts on the corpus; let the target
write texts; *alignment*: distill the drafts from the target (Hinton et al. 2015) on the corpus and on the target's own
texts (DistillSpec, Zhou et al. 2023). The feature head learns from the target alone. The seed fixes data and order, and
budgets count tokens. Another machine reproduces the figures, but not the exact bits of the weights.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from bass_core.environment import write_whole
from bass_lab.pair.feature_head import new_head, save_head, unrolled_loss
from bass_lab.pair.fitting import (
    Teacher,
    distillation_loss,
    fit,
    new_model,
    next_token_loss,
    save,
    say,
    seeds_of,
    workers,
    write_texts,
)
from bass_lab.pair.windows import Windows, train_tokenizer
from bass_lab.provenance import describe_environment
from bass_lab.texts import corpus

WORK = Path("build/embedded_pair")

Batches = Callable[[float, torch.Generator], Tensor]


def _sizes(hidden: int, layers: int, heads: int, key_value_heads: int, intermediate: int) -> dict:
    return {"hidden_size": hidden, "num_hidden_layers": layers} | _layer(heads, key_value_heads, intermediate)


def _layer(heads: int, key_value_heads: int, intermediate: int) -> dict:
    sizes = {"num_attention_heads": heads, "num_key_value_heads": key_value_heads, "head_dim": 32}
    return sizes | {"intermediate_size": intermediate}


DRAFTS = {  # equal size, different depth
    "draft": _sizes(224, 1, 7, 7, 560),
    "middle_draft": _sizes(128, 3, 4, 4, 416),
    "deep_draft": _sizes(84, 8, 3, 3, 216),
}


@dataclass(frozen=True)
class Recipe:
    """Model sizes, data and budgets. The defaults train the embedded pair."""

    seed: int = 0
    vocab_size: int = 1024
    context: int = 1024
    generated: int = 150_000  # functions
    generated_share: float = 0.65  # share of the windows; the rest is library text
    batch_tokens: int = 4096
    lengths: tuple[tuple[float, int], ...] = ((0.0, 256), (0.85, 512), (0.96, 1024))  # (from progress, window length)
    target: dict = field(default_factory=lambda: _sizes(192, 20, 6, 2, 512))
    drafts: dict[str, dict] = field(default_factory=lambda: dict(DRAFTS))
    feature_head: dict = field(default_factory=lambda: _layer(6, 6, 640))
    target_tokens: int = 14_000_000
    draft_tokens: int = 5_000_000
    aligning_tokens: int = 5_000_000
    feature_tokens: int = 5_000_000
    target_lr: float = 1.5e-2
    draft_lr: float = 2e-2
    aligning_lr: float = 1e-2
    feature_lr: float = 2e-2
    aligning_temperatures: tuple[float, ...] = (1.0, 0.4)  # the drafts are used at low temperatures, too
    target_texts: int = 1536  # texts that the target writes for the alignment
    text_tokens: int = 256  # tokens per text
    threads: int = 2

    @property
    def data(self) -> tuple:
        """The fields that decide the windows and their order."""
        return self.seed, self.vocab_size, self.generated, self.generated_share, self.batch_tokens, self.lengths

    def __post_init__(self):
        budgets = [each.name for each in fields(self) if each.name.endswith("_tokens")]
        for name in (*budgets, "generated", "target_texts", "threads"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")


@dataclass(frozen=True)
class Data:
    """The training corpus as token windows of generated and library functions."""

    generated: Windows
    library: Windows
    recipe: Recipe

    def batch(self, progress: float, generator: torch.Generator) -> Tensor:
        """Return windows [B, Q], with B × Q = batch_tokens. Q grows with `progress`."""
        length = next(length for begin, length in reversed(self.recipe.lengths) if progress >= begin)
        count = self.recipe.batch_tokens // length
        mine = int((torch.rand(count, generator=generator) < self.recipe.generated_share).sum())
        return torch.cat(
            [self.generated.take(mine, length, generator), self.library.take(count - mine, length, generator)]
        )


def train_pair(recipe: Recipe, folder: Path, work: Path = WORK) -> dict:
    """Train tokenizer, target, drafts and feature head, and write each to `folder`/name. Return the figures.

    `work` stores the state of each stage, and a second call resumes. `folder`/unaligned_* are the drafts before
    alignment.
    """
    torch.manual_seed(recipe.seed)
    work.mkdir(parents=True, exist_ok=True)
    generated, library = corpus.generated_functions(recipe.generated, recipe.seed), corpus.library_functions()
    tokenizer = AutoTokenizer.from_pretrained(_tokenizer(work, recipe, generated, library))
    data = Data(Windows(generated, tokenizer), Windows(library, tokenizer), recipe)
    say(f"corpus: {len(data.generated.stream)} tokens of generated, {len(data.library.stream)} of library functions")
    training = _Training(data, tokenizer, folder, work)
    target = training.target()
    own = _own_texts(target, data, work)
    teacher = Teacher(target, own)
    taught = partial(_with_own_texts, data, own)
    training.drafts()
    training.align(teacher, taught)
    training.feature_head(teacher, taught)
    return training.report | {"seed": recipe.seed, "machine": machine(), "own_texts": own.numel()}


class _Training:
    """The training stages. Each stage writes its models and adds its figures to the report."""

    def __init__(self, data: Data, tokenizer: PreTrainedTokenizerBase, folder: Path, work: Path):
        self.recipe, self.data, self.tokenizer, self.folder = data.recipe, data, tokenizer, folder
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.models: dict[str, PreTrainedModel] = {}
        self.report: dict[str, Any] = {}
        options = {"data": data.recipe.data, "seed": data.recipe.seed, "threads": data.recipe.threads}
        self.fit = partial(fit, **options, folder=work)

    def target(self) -> PreTrainedModel:
        recipe, target = self.recipe, self._new("target", self.recipe.target)
        loss, budget = partial(next_token_loss, target), {"tokens": recipe.target_tokens, "lr": recipe.target_lr}
        self.report["target"] |= self.fit(target, loss, self.data.batch, **budget, name="target")
        save(target, self.tokenizer, self.folder / "target")
        return target

    def drafts(self) -> None:
        """Train all drafts on the corpus."""
        recipe = self.recipe
        torch.manual_seed(recipe.seed)
        drafts = nn.ModuleDict({name: self._new(name, sizes) for name, sizes in recipe.drafts.items()})

        def loss(windows: Tensor) -> Tensor:
            return sum(next_token_loss(draft, windows) for draft in drafts.values())

        budget = {"tokens": recipe.draft_tokens, "lr": recipe.draft_lr}
        self.report["drafts"] = self.fit(drafts, loss, self.data.batch, **budget, name="drafts")
        for name, draft in drafts.items():
            save(draft, self.tokenizer, self.folder / f"unaligned_{name}")

    def align(self, teacher: Teacher, taught: Batches) -> None:
        """Distill the drafts from the target."""
        recipe = self.recipe
        drafts = nn.ModuleDict({name: self.models[name] for name in recipe.drafts})

        def loss(windows: Tensor) -> Tensor:
            return distillation_loss(drafts.values(), teacher, windows, recipe.aligning_temperatures)

        budget = {"tokens": recipe.aligning_tokens, "lr": recipe.aligning_lr}
        self.report["alignment"] = self.fit(drafts, loss, taught, **budget, name="alignment")
        for name, draft in drafts.items():
            save(draft, self.tokenizer, self.folder / name)

    def feature_head(self, teacher: Teacher, taught: Batches) -> None:
        recipe = self.recipe
        torch.manual_seed(recipe.seed)
        head = new_head(teacher.target, recipe.feature_head)

        def loss(windows: Tensor) -> Tensor:
            return unrolled_loss(head, teacher, windows, recipe.aligning_temperatures)

        budget = {"tokens": recipe.feature_tokens, "lr": recipe.feature_lr}
        self.report["feature_head"] = size(head) | self.fit(head, loss, taught, **budget, name="feature_head")
        save_head(head, self.folder / "feature_head")

    def _new(self, name: str, sizes: dict) -> PreTrainedModel:
        model = self.models[name] = new_model(sizes, self.tokenizer).to(self.device)
        self.report[name] = size(model)
        return model


def _tokenizer(work: Path, recipe: Recipe, generated: list[str], library: list[str]) -> Path:
    """Return the tokenizer's folder in `work`, trained if missing."""
    folder = work / "tokenizer"
    if not folder.exists():
        texts = [*generated[:20_000], *library[::2]]
        train_tokenizer(texts, recipe.vocab_size, recipe.context).save_pretrained(folder)
    return folder


def _own_texts(target: PreTrainedModel, data: Data, work: Path, prompt: int = 32) -> Tensor:
    """Return corpus beginnings continued by the target, from `work`/texts.pt if possible: [texts, tokens]."""
    file, recipe = work / "texts.pt", data.recipe
    if not file.exists():
        generator = torch.Generator().manual_seed(recipe.seed + 1)
        prompts = []
        while sum(map(len, prompts)) < recipe.target_texts:
            prompts.append(data.batch(0.0, generator)[:, :prompt].to(target.device))
        half = torch.cat(prompts)[: recipe.target_texts].chunk(2)
        target.set_attn_implementation("sdpa")  # "bass_training" needs whole windows
        with workers(recipe.threads) as pool:
            parts = []
            for prompts, temperature in zip(half, (0.2, 1.0), strict=True):  # half of the texts nearly greedy
                write = partial(write_texts, target, length=recipe.text_tokens, temperature=temperature)
                split = prompts.split(96)
                parts += pool.map(
                    lambda part, seed, write=write: write(part, seed=seed), split, seeds_of(split, generator)
                )
        target.set_attn_implementation("bass_training")
        torch.save(torch.cat(parts).cpu(), file)
    return torch.load(file, weights_only=True)


def _with_own_texts(data: Data, own: Tensor, progress: float, generator: torch.Generator) -> Tensor:
    """Return corpus windows or, with probability 2/3, texts of the target."""
    if torch.rand(1, generator=generator) < 1 / 3:
        return data.batch(progress, generator)
    count = data.recipe.batch_tokens // own.shape[1]
    return own[torch.randint(0, len(own), (count,), generator=generator)]


def size(model: PreTrainedModel) -> dict[str, float]:
    """Return the number of parameters and the megabytes in bfloat16."""
    count = model.num_parameters()
    return {"parameters": count, "megabytes": round(2 * count / 1e6, 2)}


def machine() -> str:
    """Describe the training machine."""
    here = describe_environment()
    return f"{here['device']}, {here['cores']} cores, Python {here['python']}, torch {here['torch']}"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bass_lab.pair.training", description="Train the embedded pair.")
    parser.add_argument("--seed", type=int, default=Recipe.seed)
    parser.add_argument("--output", type=Path, default=WORK / "trained", help="folder for the trained models")
    parser.add_argument("--work", type=Path, default=WORK, help="folder for the state of unfinished stages")
    options = parser.parse_args()
    report = train_pair(Recipe(seed=options.seed), options.output, options.work)
    write_whole(options.output / "training.json", json.dumps(report, indent=1) + "\n")
    say(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
