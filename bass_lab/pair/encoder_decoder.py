"""Train the embedded encoder-decoder pair from scratch on two CPU cores in half an hour: `make encoder-decoder-pair`.

The pair reads the signature and docstring of a generated function and writes the body. The target's decoder is deep,
and the draft's decoder has one layer, because the number of layers decides the cost of a pass. The encoder runs once
per source. Pegasus layers have the fewest operations. Each stage resumes after an interruption: train target and draft
on the corpus; let the target write texts; distill the draft from the target on both.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import (
    AutoTokenizer,
    GenerationConfig,
    PegasusConfig,
    PegasusForConditionalGeneration,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from bass_core.environment import write_whole
from bass_core.loading.model_pair import ASSETS, ModelPair
from bass_lab.pair.fitting import Drawn, divergence, fit, save, say, seeds_of, workers
from bass_lab.pair.training import machine, size
from bass_lab.texts import grammar

WORK = Path("build/encoder_decoder")
UNUSED = -100  # label of padding: no loss


def _sizes(width: int, encoder: int, decoder: int, heads: int) -> dict[str, int]:
    found = {"d_model": width, "encoder_layers": encoder, "decoder_layers": decoder}
    for part in ("encoder", "decoder"):
        found |= {f"{part}_attention_heads": heads, f"{part}_ffn_dim": 2 * width}
    return found


@dataclass(frozen=True)
class ReaderRecipe:
    """Model sizes, data and budgets. The defaults train the embedded pair."""

    seed: int = 0
    context: int = 256
    functions: int = 150_000
    batch_tokens: int = 6144
    target: dict = field(default_factory=lambda: _sizes(128, 2, 7, 4))
    draft: dict = field(default_factory=lambda: _sizes(96, 1, 1, 3))
    target_tokens: int = 20_000_000
    draft_tokens: int = 4_000_000
    aligning_tokens: int = 6_000_000
    target_lr: float = 2e-2
    draft_lr: float = 2e-2
    aligning_lr: float = 1e-2
    aligning_temperatures: tuple[float, ...] = (1.0, 0.4)  # the draft is used at low temperatures, too
    target_texts: int = 4096  # texts that the target writes for the alignment
    threads: int = 2


class Pairs:
    """Sources and texts, in batches of similar length."""

    def __init__(self, sources: list[list[int]], texts: list[list[int]], batch_tokens: int):
        """sources, texts: token ids, with an end-of-text token after each text."""
        longest_first = sorted(range(len(texts)), key=lambda index: len(texts[index]) + len(sources[index]))
        self.sources = [torch.tensor(sources[index]) for index in longest_first]
        self.texts = [torch.tensor(texts[index]) for index in longest_first]
        self.batch_tokens = batch_tokens

    def batch(self, progress: float, generator: torch.Generator) -> Tensor:
        """Return a batch [B, 1 + S + T]: S, then sources (padded with 0), then texts (padded with UNUSED)."""
        middle = int(torch.randint(len(self.texts), (1,), generator=generator))
        count = self.batch_tokens // (len(self.texts[middle]) + len(self.sources[middle]))
        first = max(0, min(middle - count // 2, len(self.texts) - count))
        rows = slice(first, first + count)
        read = pad_sequence(self.sources[rows], batch_first=True)
        written = pad_sequence(self.texts[rows], batch_first=True, padding_value=UNUSED)
        return torch.cat([torch.full((len(read), 1), read.shape[1]), read, written], 1)


def split(batch: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """Return the model inputs and the labels [B, T] of a batch."""
    width = int(batch[0, 0])
    read, written = batch[:, 1 : 1 + width], batch[:, 1 + width :]
    begun = F.pad(written[:, :-1].clamp(min=0), (1, 0))  # shifted right, starting with id 0
    return {"input_ids": read, "attention_mask": (read != 0).long(), "decoder_input_ids": begun}, written


def loss_of(model: PreTrainedModel, batch: Tensor) -> Tensor:
    """Return the mean cross-entropy in nats per text token."""
    given, written = split(batch)
    logits = model(**given, use_cache=False).logits
    return F.cross_entropy(logits.flatten(0, 1).float(), written.flatten(), ignore_index=UNUSED)


def aligning_loss(draft: PreTrainedModel, target: PreTrainedModel, batch: Tensor, temperatures: tuple) -> Tensor:
    """Return KL(target || draft) in nats per token, mean over the temperatures."""
    given, written = split(batch)
    with torch.no_grad():
        wanted = target(**given, use_cache=False).logits
    kept = written != UNUSED
    return divergence(wanted[kept][None], draft(**given, use_cache=False).logits[kept][None], temperatures)


def new_model(sizes: dict, context: int, tokenizer: PreTrainedTokenizerBase) -> PegasusForConditionalGeneration:
    """Return a model with random weights and the tokenizer's vocabulary. Its texts begin and end with id 0."""
    config = PegasusConfig(
        **sizes,
        vocab_size=len(tokenizer),
        max_position_embeddings=context,
        dropout=0.0,
        activation_function="gelu",
        scale_embedding=True,
        pad_token_id=0,
        eos_token_id=0,
        decoder_start_token_id=0,
        forced_eos_token_id=None,
    )
    return PegasusForConditionalGeneration(config)


def encoded(functions: list[grammar.Function], tokenizer: PreTrainedTokenizerBase) -> tuple[list, list]:
    """Return the token ids of sources (signature and docstring) and texts (body and end of text)."""
    sources = tokenizer([function.prompt for function in functions])["input_ids"]
    bodies = tokenizer([function.body for function in functions])["input_ids"]
    return sources, [[*body, tokenizer.eos_token_id] for body in bodies]


def train(recipe: ReaderRecipe, folder: Path, work: Path = WORK) -> dict:
    """Train target and draft, and write `folder`/target and `folder`/draft. Return the figures. `work` stores the state
    of each stage."""
    torch.manual_seed(recipe.seed)
    tokenizer = AutoTokenizer.from_pretrained(ASSETS / "target")
    functions = grammar.functions(recipe.functions, recipe.seed, held_out=False)
    pairs = Pairs(*encoded(functions, tokenizer), recipe.batch_tokens)
    target, draft = (new_model(sizes, recipe.context, tokenizer) for sizes in (recipe.target, recipe.draft))
    report = {"target": size(target), "draft": size(draft), "seed": recipe.seed, "machine": machine()}
    data = (recipe.seed, recipe.functions, recipe.batch_tokens)
    options = {"data": data, "seed": recipe.seed, "threads": recipe.threads, "folder": work}

    def trained(name: str, model: PreTrainedModel, loss: Callable, batches: Callable, lr: float, tokens: int) -> None:
        report[f"{name} training"] = fit(model, loss, batches, tokens=tokens, lr=lr, name=name, **options)

    trained("target", target, partial(loss_of, target), pairs.batch, recipe.target_lr, recipe.target_tokens)
    trained("draft", draft, partial(loss_of, draft), pairs.batch, recipe.draft_lr, recipe.draft_tokens)
    own = _own_texts(target, functions, tokenizer, recipe, work)
    taught = partial(_from_either, pairs, own)
    aligning = partial(aligning_loss, draft, target, temperatures=recipe.aligning_temperatures)
    trained("alignment", draft, aligning, taught, recipe.aligning_lr, recipe.aligning_tokens)
    for name, model in (("target", target), ("draft", draft)):
        save(model, tokenizer, folder / name, decoder_start_token_id=0)
    return report


def _own_texts(
    target: PreTrainedModel, functions: list, tokenizer: PreTrainedTokenizerBase, recipe: ReaderRecipe, work: Path
) -> Pairs:
    """Return the target's texts for the first sources, from `work`/texts.pt if possible: half nearly greedy, half
    sampled at temperature 1."""
    file = work / "texts.pt"
    sources, _ = encoded(functions[: recipe.target_texts], tokenizer)
    if not file.exists():
        half, generator = len(sources) // 2, torch.Generator().manual_seed(recipe.seed + 1)
        with workers(recipe.threads) as pool:
            texts = []
            for part, temperature in ((sources[:half], 0.2), (sources[half:], 1.0)):
                batches = [part[first : first + 128] for first in range(0, len(part), 128)]
                for written in pool.map(partial(_write, target, temperature), batches, seeds_of(batches, generator)):
                    texts += written
        torch.save(texts, file)
    return Pairs(sources, torch.load(file), recipe.batch_tokens)


@torch.no_grad()
def _write(target: PreTrainedModel, temperature: float, sources: list[list[int]], seed: int) -> list[list[int]]:
    """Let the target write a text of at most 128 tokens for each source, including the end of text."""
    read = pad_sequence([torch.tensor(source) for source in sources], batch_first=True)
    ids = {"eos_token_id": 0, "pad_token_id": 0, "decoder_start_token_id": 0}
    rows = target.generate(
        read,
        attention_mask=(read != 0).long(),
        logits_processor=[Drawn(temperature, seed, read.device)],
        generation_config=GenerationConfig(do_sample=False, max_new_tokens=128, **ids),
    )[:, 1:].tolist()
    return [row[: row.index(0) + 1] if 0 in row else row for row in rows]


def _from_either(pairs: Pairs, own: Pairs, progress: float, generator: torch.Generator) -> Tensor:
    """Return a batch of the corpus or, with probability 2/3, of the target's own texts."""
    return (pairs if torch.rand(1, generator=generator) < 1 / 3 else own).batch(progress, generator)


@torch.no_grad()
def held_out_losses(pair: ModelPair, functions: list[grammar.Function]) -> dict[str, float]:
    """Return the next-token loss of target and draft on these functions, in nats."""
    pairs = Pairs(*encoded(functions, pair.tokenizer), batch_tokens=4096)
    generator = torch.Generator().manual_seed(1)
    batches = [pairs.batch(0.0, generator).to(pair.device) for _ in range(8)]
    models = {"target": pair.target, "draft": pair.draft}
    return {name: sum(float(loss_of(model, each)) for each in batches) / 8 for name, model in models.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bass_lab.pair.encoder_decoder", description="Train the embedded encoder-decoder pair."
    )
    parser.add_argument("--seed", type=int, default=ReaderRecipe.seed)
    parser.add_argument("--output", type=Path, default=WORK / "trained", help="folder for the trained models")
    parser.add_argument("--work", type=Path, default=WORK, help="folder for the state of unfinished stages")
    options = parser.parse_args()
    report = train(ReaderRecipe(seed=options.seed), options.output, options.work)
    write_whole(options.output / "training.json", json.dumps(report, indent=1) + "\n")
    say(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
