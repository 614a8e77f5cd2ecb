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
import math
import os
import platform
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import (
    AttentionInterface,
    AutoTokenizer,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from bass_lab.pair.windows import Windows, train_tokenizer
from bass_lab.texts import corpus

WORK = Path("build/embedded_pair")
DRAFTS = ("draft", "deep_draft")


def _sizes(hidden: int, layers: int, heads: int, key_value_heads: int, intermediate: int, head_dim: int = 32) -> dict:
    return {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": key_value_heads,
        "head_dim": head_dim,
        "intermediate_size": intermediate,
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
    draft: dict = field(default_factory=lambda: _sizes(224, 1, 7, 7, 560))
    deep_draft: dict = field(default_factory=lambda: _sizes(96, 6, 3, 3, 256))
    target_tokens: int = 14_000_000
    draft_tokens: int = 5_000_000
    aligning_tokens: int = 5_000_000
    target_lr: float = 1.5e-2
    draft_lr: float = 2e-2
    aligning_lr: float = 1e-2
    aligning_temperatures: tuple[float, ...] = (1.0, 0.4)  # the drafts are used at low temperatures too
    target_texts: int = 1536  # texts of the target's own that the drafts also learn from
    text_tokens: int = 256  # in each of them
    threads: int = 2

    @property
    def data(self) -> tuple:
        """What decides the order of the data."""
        return self.seed, self.vocab_size, self.generated, self.generated_share, self.batch_tokens, self.lengths

    def __post_init__(self):
        for name in ("target_tokens", "draft_tokens", "aligning_tokens", "generated", "target_texts", "threads"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")


# --------------------------------------------------------------------------------------------------------- one training


def _attention(module, query, key, value, attention_mask, scaling, **kwargs) -> tuple[Tensor, None]:
    """Causal attention of whole windows as two matrix products: 1.5 times the tokens/s of SDPA on a CPU."""
    rows, heads, length, dim = query.shape
    groups = heads // key.shape[1]
    query = (query * scaling).reshape(-1, groups * length, dim)  # [B × KV heads, groups × Q, D]
    key, value = (states.reshape(-1, length, dim) for states in (key, value))
    hidden = torch.full((length, length), float("-inf"), dtype=query.dtype, device=query.device).triu(1)
    scores = torch.bmm(query, key.transpose(1, 2)).view(-1, groups, length, length) + hidden
    weights = scores.softmax(-1).to(value.dtype).view(-1, groups * length, length)
    return torch.bmm(weights, value).view(rows, heads, length, dim).transpose(1, 2).contiguous(), None


AttentionInterface.register("bass_training", _attention)


def new_model(sizes: dict, recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> LlamaForCausalLM:
    """A Llama model with random weights and tied embeddings, its attention and norms made for training."""
    config = LlamaConfig(
        **sizes,
        vocab_size=recipe.vocab_size,
        max_position_embeddings=recipe.context,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        attn_implementation="bass_training",
    )
    model = LlamaForCausalLM(config)
    for norm in model.modules():
        if isinstance(norm, LlamaRMSNorm):  # one operation instead of six: 15% more tokens/s
            norm.forward = partial(_rms_norm, norm)
    return model


def _rms_norm(norm: LlamaRMSNorm, states: Tensor) -> Tensor:
    return F.rms_norm(states, (states.shape[-1],), norm.weight, norm.variance_epsilon)


def fit(
    model: nn.Module,
    loss_of: Callable[[Tensor], Tensor],
    batches: Callable[[float, torch.Generator], Tensor],
    *,
    tokens: int,
    lr: float,
    name: str,
    recipe: Recipe,
    folder: Path,
    save_every: float = 180.0,
) -> dict[str, float]:
    """Train on `tokens` tokens: warm-up, then the learning rates fall to zero along a cosine.

    `batches(progress, generator)` gives windows [B, Q] for the part of the tokens that is over, `loss_of(windows)` a
    scalar. On a CPU each of `recipe.threads` threads takes a share of the rows and computes on one core: ten percent
    faster than two cores per operation, and many times faster beside another busy process, where OpenMP's threads spin
    waiting for each other.

    Everything is kept in `folder`/`name`.pt every `save_every` seconds; a second call goes on from there, and returns
    at once when the training is complete. Returns tokens, steps, seconds, and the mean losses of the first ten and the
    last fifty steps. Raises ValueError if the file there was made by another recipe.
    """
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{name}.pt"
    parameters = list(model.parameters())
    made_by = repr((tokens, lr, recipe.data, [tuple(parameter.shape) for parameter in parameters]))
    optimizers = _optimizers(model, lr)
    generator = torch.Generator().manual_seed(recipe.seed)
    seen, losses, before = 0, [], 0.0
    if file.exists():
        state = torch.load(file, weights_only=True)
        if state["made_by"] != made_by:
            raise ValueError(f"{file} was made by another recipe; delete it, and what was trained after it")
        model.load_state_dict(state["model"])
        for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        generator.set_state(state["generator"])
        seen, losses, before = state["seen"], state["losses"], state["seconds"]
        say(f"{name}: going on after {seen} tokens")

    def keep() -> None:
        state = {"made_by": made_by, "model": model.state_dict(), "generator": generator.get_state(), "seen": seen}
        state |= {"losses": losses, "seconds": before + time.monotonic() - start}
        state["optimizers"] = [optimizer.state_dict() for optimizer in optimizers]
        torch.save(state, file.with_suffix(".tmp"))
        file.with_suffix(".tmp").replace(file)  # an interrupted write leaves the last good file

    def gradients(windows: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        with torch.autocast(windows.device.type, torch.bfloat16):
            loss = loss_of(windows)
        return loss.detach(), torch.autograd.grad(loss, parameters)

    model.train()
    device = parameters[0].device
    start = reported = saved_at = time.monotonic()
    began_at = seen
    with _workers(recipe.threads) as pool:
        while seen < tokens:
            progress = seen / tokens
            windows = batches(progress, generator).to(device)
            shares = list(pool.map(gradients, windows.chunk(recipe.threads if device.type == "cpu" else 1)))
            for parameter, *parts in zip(parameters, *(share[1] for share in shares), strict=True):
                parameter.grad = sum(parts) / len(parts)
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            scale = min(1.0, (len(losses) + 1) / 40) * 0.5 * (1 + math.cos(math.pi * progress))
            for optimizer in optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = group["peak_lr"] * scale
                optimizer.step()
            losses.append(sum(share[0].item() for share in shares) / len(shares))
            seen += windows.numel()
            now = time.monotonic()
            if now - reported > 30:
                reported, recent = now, losses[-50:]
                speed, mean = (seen - began_at) / (now - start), sum(recent) / len(recent)
                say(f"{name}: {seen / tokens:.1%}, {speed:.0f} tokens/s, loss {mean:.3f}")
            if now - saved_at > save_every:
                saved_at = now
                keep()
        if seen > began_at:
            keep()
    model.eval()
    return {
        "tokens": seen,
        "steps": len(losses),
        "seconds": round(before + time.monotonic() - start, 1),
        "first_loss": sum(losses[:10]) / len(losses[:10]),
        "last_loss": sum(losses[-50:]) / len(losses[-50:]),
    }


def _optimizers(model: nn.Module, lr: float) -> list[torch.optim.Optimizer]:
    """Muon (Jordan et al. 2024) for the matrices inside the layers, AdamW for embeddings and norms.

    There is time for few steps. After 75 of them the held-out loss of generated functions was 2.9 nats, 4.9 with AdamW.
    """
    inner = [p for name, p in model.named_parameters() if p.dim() == 2 and "embed" not in name]
    others = [p for name, p in model.named_parameters() if p.dim() != 2 or "embed" in name]
    muon = torch.optim.Muon(inner, weight_decay=0.1, momentum=0.95, adjust_lr_fn="match_rms_adamw")
    adam = torch.optim.AdamW(others, betas=(0.9, 0.95), weight_decay=0.0)
    for optimizer, peak in ((muon, lr), (adam, lr / 4)):
        for group in optimizer.param_groups:
            group["peak_lr"] = peak
    return [muon, adam]


@contextmanager
def _workers(threads: int) -> Iterator[ThreadPoolExecutor]:
    """Threads that each compute on one core; so does the caller until they are gone."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            yield pool
    finally:
        torch.set_num_threads(before)


def next_token_loss(model: PreTrainedModel, windows: Tensor) -> Tensor:
    """Mean cross-entropy in nats per token of windows [B, Q]."""
    logits = model(windows, use_cache=False).logits  # [B, Q, V]
    return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), windows[:, 1:].flatten())


def distillation_loss(
    drafts: Iterable[PreTrainedModel], target: PreTrainedModel, windows: Tensor, temperatures: tuple[float, ...]
) -> Tensor:
    """KL(target || draft) in nats per token of windows [B, Q]: mean over the temperatures, sum over the drafts."""
    with torch.no_grad():
        wanted = target(windows, use_cache=False).logits.flatten(0, 1).float()  # [B × Q, V]
    total = torch.zeros((), device=windows.device)
    for draft in drafts:
        logits = draft(windows, use_cache=False).logits.flatten(0, 1).float()
        for t in temperatures:
            p, q = (wanted / t).log_softmax(-1), (logits / t).log_softmax(-1)
            total = total + F.kl_div(q, p, reduction="batchmean", log_target=True) / len(temperatures)
    return total


@torch.no_grad()
def write_texts(target: PreTrainedModel, windows: Tensor, length: int, temperature: float) -> Tensor:
    """The target continues the windows [B, Q] past ends of texts, up to `length` tokens: [B, length]."""
    return target.generate(
        windows,
        attention_mask=torch.ones_like(windows),
        generation_config=GenerationConfig(
            do_sample=True, temperature=temperature, top_k=0, max_new_tokens=length - windows.shape[1], pad_token_id=0
        ),
    )


# ----------------------------------------------------------------------------------------------------------- the recipe


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


def train_pair(recipe: Recipe, folder: Path, work: Path = WORK) -> dict:
    """Train tokenizer, target and drafts, write them to `folder`/{target, draft, deep_draft}; returns the figures.

    `work` keeps unfinished and finished stages; a second call goes on from there. `folder`/unaligned_* are the drafts
    before alignment: to measure with, not to ship.
    """
    torch.manual_seed(recipe.seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    generated, library = corpus.generated_functions(recipe.generated, recipe.seed), corpus.library_functions()
    tokenizer = _tokenizer_of(work, recipe, generated, library)
    data = Data(Windows(generated, tokenizer), Windows(library, tokenizer), recipe)
    say(f"corpus: {len(data.generated.stream)} tokens of generated, {len(data.library.stream)} of library functions")
    target = new_model(recipe.target, recipe, tokenizer).to(device)
    drafts = nn.ModuleDict({name: new_model(getattr(recipe, name), recipe, tokenizer).to(device) for name in DRAFTS})
    stage = partial(fit, recipe=recipe, folder=work)

    report = {"target": _size(target)} | {name: _size(draft) for name, draft in drafts.items()}
    report["target"] |= stage(
        target,
        partial(next_token_loss, target),
        data.batch,
        tokens=recipe.target_tokens,
        lr=recipe.target_lr,
        name="target",
    )
    report["drafts"] = stage(
        drafts,
        lambda windows: sum(next_token_loss(draft, windows) for draft in drafts.values()),
        data.batch,
        tokens=recipe.draft_tokens,
        lr=recipe.draft_lr,
        name="drafts",
    )
    for name, draft in drafts.items():
        save(draft, tokenizer, folder / f"unaligned_{name}")
    own = _own_texts(target, data, work)
    report["alignment"] = stage(
        drafts,
        lambda windows: distillation_loss(drafts.values(), target, windows, recipe.aligning_temperatures),
        partial(_with_own_texts, data, own),
        tokens=recipe.aligning_tokens,
        lr=recipe.aligning_lr,
        name="alignment",
    )
    for name, model in (("target", target), *drafts.items()):
        save(model, tokenizer, folder / name)
    return report | {"seed": recipe.seed, "machine": _machine(), "own_texts": own.numel()}


def _tokenizer_of(work: Path, recipe: Recipe, generated: list[str], library: list[str]) -> PreTrainedTokenizerBase:
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
        with _workers(recipe.threads) as pool:
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


def say(text: str) -> None:
    print(text, flush=True)


def _size(model: PreTrainedModel) -> dict[str, float]:
    count = sum(parameter.numel() for parameter in model.parameters())
    return {"parameters": count, "megabytes": round(2 * count / 1e6, 2)}


def _machine() -> str:
    device = (
        torch.cuda.get_device_name() if torch.cuda.is_available() else f"{os.cpu_count()}-core {platform.machine()}"
    )
    return f"{device}, Python {platform.python_version()}, torch {torch.__version__}"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bass_lab.pair.training", description="Train the embedded pair.")
    parser.add_argument("--seed", type=int, default=Recipe.seed)
    parser.add_argument("--output", type=Path, default=WORK / "trained", help="folder for the trained models")
    parser.add_argument("--work", type=Path, default=WORK, help="folder for unfinished stages")
    options = parser.parse_args()
    report = train_pair(Recipe(seed=options.seed), options.output, options.work)
    (options.output / "training.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    say(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
