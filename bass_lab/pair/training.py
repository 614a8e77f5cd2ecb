"""Pre-train the embedded pair from nothing, on two CPU cores, in less than two hours: `make embedded-pair`.

The target is deep, the main draft one wide layer. Both choices are about *time*, not about parameters: a forward pass
of models this small costs what its number of layers costs, so a draft of one layer is about ten times cheaper than a
target of twenty, as the pairs are that people use. A second draft of equal size, deep and narrow, shows what that
choice is worth.

Stages, each resumed where it was cut off: the tokenizer; the target and the drafts, each from the corpus; texts that
the target writes; *alignment*: the drafts learn the target's probabilities (knowledge distillation, Hinton et al. 2015)
on the corpus and on the target's own texts (DistillSpec, Zhou et al. 2023), because those are what they will be asked
to predict.

The seed fixes corpus, tokenizer and the order of the data; the budgets are counted in tokens, so that a slower machine
trains longer and not less. Sums are rounded differently on other machines: figures repeat, weights do not to the bit.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import (
    AutoTokenizer,
    GenerationConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from bass_core.environment import write_whole
from bass_lab.pair.feature_head import new_head, save_head, unrolled_loss
from bass_lab.pair.fitting import (
    Teacher,
    distillation_loss,
    fit,
    new_model,
    next_token_loss,
    say,
    workers,
    write_texts,
)
from bass_lab.pair.windows import Windows, train_tokenizer
from bass_lab.provenance import describe_environment
from bass_lab.texts import corpus

WORK = Path("build/embedded_pair")


def _sizes(hidden: int, layers: int, heads: int, key_value_heads: int, intermediate: int, head_dim: int = 32) -> dict:
    layer = _layer(heads, key_value_heads, intermediate, head_dim)
    return {"hidden_size": hidden, "num_hidden_layers": layers} | layer


def _layer(heads: int, key_value_heads: int, intermediate: int, head_dim: int = 32) -> dict:
    return {
        "num_attention_heads": heads,
        "num_key_value_heads": key_value_heads,
        "head_dim": head_dim,
        "intermediate_size": intermediate,
    }


# As many parameters in one layer, two, six and eight.
DRAFTS = {
    "draft": _sizes(224, 1, 7, 7, 560),
    "draft_2x160": _sizes(160, 2, 5, 5, 448),
    "deep_draft": _sizes(96, 6, 3, 3, 256),
    "draft_8x84": _sizes(84, 8, 3, 3, 216),
}


@dataclass(frozen=True)
class Recipe:
    """What is trained, on what, for how long. The defaults are the embedded pair."""

    seed: int = 0
    vocab_size: int = 1024
    context: int = 1024
    generated: int = 150_000  # functions
    generated_share: float = 0.65  # of the windows; the rest is library text
    batch_tokens: int = 4096
    lengths: tuple[tuple[float, int], ...] = ((0.0, 256), (0.85, 512), (0.96, 1024))  # from this part on, window length
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
    aligning_temperatures: tuple[float, ...] = (1.0, 0.4)  # the drafts are used at low temperatures too
    target_texts: int = 1536  # texts of the target's own that the drafts also learn from
    text_tokens: int = 256  # in each of them
    threads: int = 2

    @property
    def data(self) -> tuple:
        """What decides the windows and their order."""
        return self.seed, self.vocab_size, self.generated, self.generated_share, self.batch_tokens, self.lengths

    def __post_init__(self):
        for name in (
            "target_tokens",
            "draft_tokens",
            "aligning_tokens",
            "feature_tokens",
            "generated",
            "target_texts",
            "threads",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")


@dataclass(frozen=True)
class Data:
    """The training corpus as token windows of two kinds."""

    generated: Windows
    library: Windows
    recipe: Recipe

    def batch(self, progress: float, generator: torch.Generator) -> Tensor:
        """Windows [B, Q], B × Q = the recipe's batch_tokens; their length grows with `progress`."""
        length = next(length for begin, length in reversed(self.recipe.lengths) if progress >= begin)
        count = self.recipe.batch_tokens // length
        mine = int((torch.rand(count, generator=generator) < self.recipe.generated_share).sum())
        return torch.cat(
            [self.generated.take(mine, length, generator), self.library.take(count - mine, length, generator)]
        )


def train_pair(recipe: Recipe, folder: Path, work: Path = WORK, trained_target: Path | None = None) -> dict:
    """Train tokenizer, target, drafts and feature head, write each to `folder`/its name; returns the figures.

    `work` keeps unfinished and finished stages; a second call goes on from there. `folder`/unaligned_* are the drafts
    before alignment. trained_target: a folder of the target, with its tokenizer, to train drafts for; it is copied.
    """
    torch.manual_seed(recipe.seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    generated, library = corpus.generated_functions(recipe.generated, recipe.seed), corpus.library_functions()
    tokenizer = _tokenizer_of(trained_target, work, recipe, generated, library)
    data = Data(Windows(generated, tokenizer), Windows(library, tokenizer), recipe)
    say(f"corpus: {len(data.generated.stream)} tokens of generated, {len(data.library.stream)} of library functions")
    target = new_model(recipe.target, tokenizer).to(device)
    drafts = nn.ModuleDict({name: new_model(sizes, tokenizer).to(device) for name, sizes in recipe.drafts.items()})
    stage = partial(fit, data=recipe.data, seed=recipe.seed, threads=recipe.threads, folder=work)

    report = {"target": _size(target)} | {name: _size(draft) for name, draft in drafts.items()}
    if trained_target is None:
        learn = partial(next_token_loss, target), data.batch
        report["target"] |= stage(target, *learn, tokens=recipe.target_tokens, lr=recipe.target_lr, name="target")
    else:
        target.load_state_dict(LlamaForCausalLM.from_pretrained(trained_target, dtype=torch.float32).state_dict())
    save(target, tokenizer, folder / "target")
    for name, draft in drafts.items():
        learn = partial(next_token_loss, draft), data.batch
        report[name] |= stage(draft, *learn, tokens=recipe.draft_tokens, lr=recipe.draft_lr, name=f"unaligned_{name}")
        save(draft, tokenizer, folder / f"unaligned_{name}")
    own = _own_texts(target, data, work)
    teacher = Teacher(target, own, recipe.threads)
    taught, temperatures = partial(_with_own_texts, data, own), recipe.aligning_temperatures
    head = new_head(target, recipe.feature_head)
    report["feature_head"] = _size(head) | stage(
        head,
        lambda windows: unrolled_loss(head, teacher, windows, temperatures),
        taught,
        tokens=recipe.feature_tokens,
        lr=recipe.feature_lr,
        name="feature_head",
    )
    save_head(head, folder / "feature_head")
    report["alignment"] = stage(
        drafts,
        lambda windows: distillation_loss(drafts.values(), teacher, windows, temperatures),
        taught,
        tokens=recipe.aligning_tokens,
        lr=recipe.aligning_lr,
        name="alignment",
    )
    for name, draft in drafts.items():
        save(draft, tokenizer, folder / name)
    return report | {"seed": recipe.seed, "machine": _machine(), "own_texts": own.numel()}


def _tokenizer_of(
    trained_target: Path | None, work: Path, recipe: Recipe, generated: list[str], library: list[str]
) -> PreTrainedTokenizerBase:
    if trained_target is not None:
        return AutoTokenizer.from_pretrained(trained_target)
    if not (work / "tokenizer").exists():
        train_tokenizer([*generated[:20_000], *library[::2]], recipe.vocab_size, recipe.context).save_pretrained(
            work / "tokenizer"
        )
    return AutoTokenizer.from_pretrained(work / "tokenizer")


def _own_texts(target: PreTrainedModel, data: Data, work: Path, prompt: int = 32) -> Tensor:
    """Windows that begin with corpus text and go on as the target would, kept in `work`/texts.pt: [texts, tokens]."""
    file, recipe = work / "texts.pt", data.recipe
    if not file.exists():
        generator = torch.Generator().manual_seed(recipe.seed + 1)
        prompts = []
        while sum(map(len, prompts)) < recipe.target_texts:
            prompts.append(data.batch(0.0, generator)[:, :prompt].to(target.device))
        half = torch.cat(prompts)[: recipe.target_texts].chunk(2)
        target.set_attn_implementation("sdpa")  # ours is for whole windows
        with workers(recipe.threads) as pool:
            parts = []
            for prompts, temperature in zip(half, (0.2, 1.0), strict=True):  # nearly greedy, and as its distribution is
                write = partial(write_texts, target, length=recipe.text_tokens, temperature=temperature)
                parts += pool.map(write, prompts.split(96))
        target.set_attn_implementation("bass_training")
        torch.save(torch.cat(parts).cpu(), file)
    return torch.load(file, weights_only=True)


def _with_own_texts(data: Data, own: Tensor, progress: float, generator: torch.Generator) -> Tensor:
    """Corpus windows or, two times in three, the target's own texts."""
    if torch.rand(1, generator=generator) < 1 / 3:
        return data.batch(progress, generator)
    count = data.recipe.batch_tokens // own.shape[1]
    return own[torch.randint(0, len(own), (count,), generator=generator)]


def save(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write an ordinary transformers folder: bfloat16 weights, configuration, generation configuration, tokenizer."""
    plain = LlamaForCausalLM(model.config).to(torch.bfloat16)
    plain.load_state_dict(model.state_dict())
    plain.generation_config = GenerationConfig(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    plain.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _size(model: PreTrainedModel) -> dict[str, float]:
    count = model.num_parameters()
    return {"parameters": count, "megabytes": round(2 * count / 1e6, 2)}


def _machine() -> str:
    here = describe_environment()
    return f"{here['device']}, {here['cores']} cores, Python {here['python']}, torch {here['torch']}"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bass_lab.pair.training", description="Train the embedded pair.")
    parser.add_argument("--seed", type=int, default=Recipe.seed)
    parser.add_argument("--output", type=Path, default=WORK / "trained", help="folder for the trained models")
    parser.add_argument("--work", type=Path, default=WORK, help="folder for unfinished stages")
    options = parser.parse_args()
    report = train_pair(Recipe(seed=options.seed), options.output, options.work)
    write_whole(options.output / "training.json", json.dumps(report, indent=1) + "\n")
    say(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
