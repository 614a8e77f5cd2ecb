"""Pre-train the embedded pair from nothing, on two CPU cores, in minutes: `python -m bass_core.training`.

The target is deep and narrow, the draft is one wide layer. Both choices are about *time*, not about parameters: a
forward pass of models this small costs what its number of layers costs, so a draft with one layer is about ten times
cheaper than a target with twenty, as the pairs are that people use. A draft learns from the target's probabilities
(knowledge distillation, Hinton et al. 2015) on corpus text and on text that the target wrote itself (DistillSpec, Zhou
et al. 2023), because that is what it will be asked to predict.

Everything is driven by a budget of wall-clock time, so the number of tokens seen depends on the machine; the seed fixes
the corpus, the tokenizer and the order of the data.
"""

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
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import (
    AttentionInterface,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from bass_core import corpus

END_OF_TEXT = "<|endoftext|>"
ASSETS = Path(__file__).parent / "assets"
CARD = ASSETS / "data_card_template.md"


@dataclass(frozen=True)
class Recipe:
    """What is trained, on what, for how long. The defaults are the embedded pair."""

    minutes: float = 19.0  # wall time of everything, measuring included
    seed: int = 0
    vocab_size: int = 1024
    context: int = 1024
    generated: int = 80_000  # functions
    generated_share: float = 0.65  # of the windows; the rest is library text
    batch_tokens: int = 4096
    lengths: tuple[tuple[float, int], ...] = ((0.0, 256), (0.75, 512), (0.95, 1024))  # from this part on, window length
    target: dict = field(
        default_factory=lambda: {
            "hidden_size": 128,
            "num_hidden_layers": 20,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "intermediate_size": 280,
        }
    )
    draft: dict = field(
        default_factory=lambda: {
            "hidden_size": 160,
            "num_hidden_layers": 1,
            "num_attention_heads": 5,
            "num_key_value_heads": 5,
            "head_dim": 32,
            "intermediate_size": 448,
        }
    )
    target_share: float = 0.70  # of the wall time
    draft_share: float = 0.20
    target_lr: float = 2e-2
    draft_lr: float = 2e-2
    target_texts: int = 512  # texts of the target's own that the draft also learns from
    threads: int = 2
    measured: int = 64  # prompts of each kind to measure acceptance with

    def __post_init__(self):
        if not 0 < self.target_share + self.draft_share <= 1:
            raise ValueError(
                f"target_share + draft_share must be in (0, 1], got {self.target_share + self.draft_share}"
            )
        if self.minutes <= 0:
            raise ValueError(f"minutes must be positive, got {self.minutes}")


def train_tokenizer(texts: Iterable[str], vocab_size: int = 1024, context: int = 1024) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer that gives any text back exactly and adds no special tokens.

    `<|endoftext|>` is id 0: it ends a text and pads a batch; nothing begins one.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            # A line's end is a token of its own: joined with the next line's indentation, as it would be, the end of a
            # prompt would look like the end of a text, and the model would stop there.
            pre_tokenizers.Split("\n", "isolated"),
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        clean_up_tokenization_spaces=False,
        model_max_length=context,
        padding_side="left",
    )


class Windows:
    """Documents of one kind joined into one stream, each followed by the end-of-text token, cut at random places.

    Half of the windows begin at the beginning of a document, because that is where a prompt begins.
    """

    def __init__(self, documents: list[str], tokenizer: PreTrainedTokenizerBase):
        # not verbose: some documents are longer than the model's context, which is no fault of a stream
        encoded = tokenizer(documents, verbose=False)["input_ids"]
        lengths = torch.tensor([len(ids) + 1 for ids in encoded])
        self.starts = lengths.cumsum(0) - lengths  # [documents]
        self.stream = torch.tensor([token for ids in encoded for token in (*ids, tokenizer.eos_token_id)])

    def take(self, count: int, length: int, generator: torch.Generator) -> Tensor:
        """`count` windows: [count, length]. Raises ValueError if the stream is shorter than a window."""
        last = len(self.stream) - length
        if last < 0:
            raise ValueError(f"a window of {length} tokens does not fit in a stream of {len(self.stream)}")
        anywhere = torch.randint(0, last + 1, (count,), generator=generator)
        begins = self.starts[torch.randint(0, len(self.starts), (count,), generator=generator)].clamp(max=last)
        at = torch.where(torch.rand(count, generator=generator) < 0.5, begins, anywhere)
        return self.stream[at[:, None] + torch.arange(length)]


def _attention(module, query, key, value, attention_mask, scaling, **kwargs) -> tuple[Tensor, None]:
    """Causal attention of whole windows as two matrix products: 1.5 times the tokens/s of SDPA on a CPU."""
    rows, heads, length, dim = query.shape
    groups = heads // key.shape[1]
    query = (query * scaling).reshape(-1, groups * length, dim)  # [B × KV heads, groups × Q, D]
    key, value = (states.reshape(-1, length, dim) for states in (key, value))
    hidden = torch.full((length, length), float("-inf"), dtype=query.dtype).triu(1)
    scores = torch.bmm(query, key.transpose(1, 2)).view(-1, groups, length, length) + hidden
    weights = scores.softmax(-1).to(value.dtype).view(-1, groups * length, length)
    return torch.bmm(weights, value).view(rows, heads, length, dim).transpose(1, 2).contiguous(), None


AttentionInterface.register("bass_training", _attention)


def new_model(sizes: dict, recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> LlamaForCausalLM:
    """A Llama model with random weights and tied embeddings."""
    config = LlamaConfig(
        **sizes,
        vocab_size=recipe.vocab_size,
        max_position_embeddings=recipe.context,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        attn_implementation="bass_training",
    )
    return LlamaForCausalLM(config)


def fit(
    model: PreTrainedModel,
    loss_of: Callable[[Tensor], Tensor],
    batches: Callable[[float], Tensor],
    *,
    lr: float,
    seconds: float,
    name: str,
    threads: int,
) -> dict[str, float]:
    """Train for `seconds` of wall time: warm-up, then the learning rates fall to zero along a cosine.

    `batches(progress)` gives windows [B, Q] for the part of the time that is over, `loss_of(windows)` a scalar. Each of
    `threads` threads takes a share of the rows and computes on one core: ten percent faster here than two cores per
    operation, and many times faster beside another busy process, where OpenMP's threads spin waiting for each other.
    Returns tokens, steps, seconds and the mean losses of the first ten and the last fifty steps.
    """
    parameters = list(model.parameters())
    optimizers = _optimizers(model, lr)
    model.train()
    start, tokens, losses, reported = time.monotonic(), 0, [], 0.0

    def gradients(windows: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_of(windows)
        return loss.detach(), torch.autograd.grad(loss, parameters)

    with _workers(threads) as pool:
        while (progress := (time.monotonic() - start) / seconds) < 1 or not losses:
            windows = batches(progress)
            shares = list(pool.map(gradients, windows.chunk(threads)))
            for parameter, *parts in zip(parameters, *(share[1] for share in shares), strict=True):
                parameter.grad = torch.stack(parts).mean(0)
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            scale = min(1.0, (len(losses) + 1) / 40) * 0.5 * (1 + math.cos(math.pi * min(progress, 1.0)))
            for optimizer in optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = group["peak_lr"] * scale
                optimizer.step()
            losses.append(sum(share[0].item() for share in shares) / len(shares))
            tokens += windows.numel()
            elapsed = time.monotonic() - start
            if elapsed - reported > 20:
                reported, recent = elapsed, losses[-20:]
                mean = sum(recent) / len(recent)
                say(f"{name}: {elapsed:4.0f} s, step {len(losses)}, {tokens / elapsed:.0f} tokens/s, loss {mean:.3f}")
    model.eval()
    return {
        "tokens": tokens,
        "steps": len(losses),
        "seconds": round(time.monotonic() - start, 1),
        "first_loss": sum(losses[:10]) / len(losses[:10]),
        "last_loss": sum(losses[-50:]) / len(losses[-50:]),
    }


def _optimizers(model: PreTrainedModel, lr: float) -> list[torch.optim.Optimizer]:
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


def distillation_loss(draft: PreTrainedModel, target: PreTrainedModel, windows: Tensor) -> Tensor:
    """Mean Kullback-Leibler divergence KL(target || draft) in nats per token of windows [B, Q]."""
    with torch.no_grad():
        p = target(windows, use_cache=False).logits.flatten(0, 1).float().log_softmax(-1)  # [B × Q, V]
    q = draft(windows, use_cache=False).logits.flatten(0, 1).float().log_softmax(-1)
    return F.kl_div(q, p, reduction="batchmean", log_target=True)


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


# ----------------------------------------------------------------------------------------------------------- measuring


@torch.no_grad()
def acceptance(
    target: PreTrainedModel,
    draft: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: list[str],
    temperature: float = 0.2,
    max_new_tokens: int = 128,
) -> dict[str, float]:
    """How well the draft predicts what the target writes after `prompts`, teacher-forced on the target's own tokens.

    alpha: mean over positions of sum_x min(p(x), q(x)) at `temperature`, on texts sampled at it: the probability that a
    draft token is accepted given that all before it were (Leviathan et al. 2023, section 3.1). greedy_agreement: share
    of positions of greedy texts where both models prefer the same token. ended: share of the greedy texts that ended by
    themselves. tokens: mean length of the greedy texts.
    """
    alphas, agreements, ended, lengths = [], [], [], []
    for begin in range(0, len(prompts), 16):
        batch = tokenizer(prompts[begin : begin + 16], return_tensors="pt", padding=True)  # padded on the left
        for sampled in (True, False):
            chosen = {"do_sample": True, "temperature": temperature, "top_k": 0} if sampled else {"do_sample": False}
            config = GenerationConfig(
                **chosen,
                max_new_tokens=max_new_tokens,
                eos_token_id=tokenizer.eos_token_id,
                pad_token_id=tokenizer.pad_token_id,
            )
            prompt, mask = batch["input_ids"], batch["attention_mask"]  # [B, Q]
            texts = target.generate(prompt, attention_mask=mask, generation_config=config)  # [B, Q + N]
            written = texts[:, prompt.shape[1] :]  # [B, N]
            is_end = written == tokenizer.eos_token_id
            counts = is_end.cumsum(1) - is_end.int() == 0  # up to and with the first end of text
            mask = torch.cat([mask, torch.ones_like(written)], 1)
            p, q = (_logits_of(model, texts, mask, written.shape[1])[counts] for model in (target, draft))  # [n, V]
            if sampled:
                p, q = ((logits / temperature).softmax(-1) for logits in (p, q))
                alphas.append(torch.minimum(p, q).sum(-1))
            else:
                agreements.append((p.argmax(-1) == q.argmax(-1)).float())
                ended.append(is_end.any(1).float())
                lengths.append(counts.sum(1).float())
    names = ("alpha", "greedy_agreement", "ended", "tokens")
    return {
        name: torch.cat(parts).mean().item()
        for name, parts in zip(names, (alphas, agreements, ended, lengths), strict=True)
    }


def _logits_of(model: PreTrainedModel, texts: Tensor, mask: Tensor, count: int) -> Tensor:
    """Logits that predicted the last `count` tokens of left-padded texts: [B, count, V]."""
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    return model(texts, attention_mask=mask, position_ids=positions, use_cache=False).logits[:, -count - 1 : -1].float()


@torch.no_grad()
def held_out_loss(model: PreTrainedModel, windows: Windows, seed: int = 1) -> float:
    """Next-token loss in nats on 64 windows of 256 tokens."""
    generator = torch.Generator().manual_seed(seed)
    return sum(next_token_loss(model, windows.take(8, 256, generator)).item() for _ in range(8)) / 8


# ----------------------------------------------------------------------------------------------------------- the recipe


def train_pair(recipe: Recipe, folder: Path) -> dict:
    """Train tokenizer, target and draft, write them to `folder`/target and `folder`/draft; returns what was measured.

    The data card `folder`/DATA_CARD.md holds the same numbers.
    """
    began = time.monotonic()
    torch.manual_seed(recipe.seed)
    generator = torch.Generator().manual_seed(recipe.seed)
    generated, library = corpus.generated_functions(recipe.generated, recipe.seed), corpus.library_functions()
    tokenizer = train_tokenizer([*generated[: recipe.generated // 4], *library[::2]], recipe.vocab_size, recipe.context)
    kinds = Windows(generated, tokenizer), Windows(library, tokenizer)
    say(f"corpus: {[len(kind.stream) for kind in kinds]} tokens, {time.monotonic() - began:.0f} s")

    def batches(progress: float) -> Tensor:
        length = next(length for begin, length in reversed(recipe.lengths) if progress >= begin)
        count = recipe.batch_tokens // length
        mine = int((torch.rand(count, generator=generator) < recipe.generated_share).sum())
        return torch.cat([kinds[0].take(mine, length, generator), kinds[1].take(count - mine, length, generator)])

    target, draft = new_model(recipe.target, recipe, tokenizer), new_model(recipe.draft, recipe, tokenizer)
    seconds = 60 * recipe.minutes
    report = {"target": _sizes(target), "draft": _sizes(draft)}
    report["target"] |= fit(
        target,
        lambda windows: next_token_loss(target, windows),
        batches,
        lr=recipe.target_lr,
        seconds=seconds * recipe.target_share,
        name="target",
        threads=recipe.threads,
    )
    own = _own_texts(target, batches, recipe)
    say(f"target wrote {own.numel()} tokens, {time.monotonic() - began:.0f} s")

    def mixed(progress: float) -> Tensor:
        windows = batches(progress)
        if windows.shape[1] != own.shape[1] or torch.rand(1, generator=generator) < 0.5:
            return windows
        return own[torch.randint(0, len(own), (len(windows),), generator=generator)]

    report["draft"] |= fit(
        draft,
        lambda windows: distillation_loss(draft, target, windows),
        mixed,
        lr=recipe.draft_lr,
        seconds=seconds * recipe.draft_share,
        name="draft",
        threads=recipe.threads,
    )
    for name, model in (("target", target), ("draft", draft)):
        save(model, tokenizer, folder / name)
    report |= measure(folder, recipe)
    report |= {"seed": recipe.seed, "minutes": round((time.monotonic() - began) / 60, 1), "machine": _machine()}
    (folder / "DATA_CARD.md").write_text(data_card(report, recipe), encoding="utf-8")
    return report


def _own_texts(target: PreTrainedModel, batches: Callable[[float], Tensor], recipe: Recipe, prompt: int = 32) -> Tensor:
    """Windows of 256 tokens that begin with corpus text and go on as the target would: [texts, 256]."""
    target.set_attn_implementation("sdpa")  # ours is for whole windows
    with _workers(recipe.threads) as pool:
        parts = []
        for temperature in (0.2, 1.0):  # nearly greedy, and as the target's distribution is
            prompts = batches(0.0)[:, :prompt]
            while len(prompts) < recipe.target_texts // 2:
                prompts = torch.cat([prompts, batches(0.0)[:, :prompt]])
            write = partial(write_texts, target, length=256, temperature=temperature)
            parts += pool.map(write, prompts.chunk(recipe.threads))
    target.set_attn_implementation("bass_training")
    return torch.cat(parts)


def measure(folder: Path, recipe: Recipe) -> dict:
    """Held-out losses and acceptance of the pair in `folder`, in float32 as it is loaded on a CPU."""
    target, draft = (
        AutoModelForCausalLM.from_pretrained(folder / name, dtype=torch.float32).eval() for name in ("target", "draft")
    )
    tokenizer = AutoTokenizer.from_pretrained(folder / "target")
    prompts = {
        "function_prompts": corpus.function_prompts(recipe.measured, recipe.seed + 1),
        "library_prompts": corpus.library_prompts(recipe.measured),
    }
    with _workers(recipe.threads) as pool:
        report = dict(
            zip(prompts, pool.map(partial(acceptance, target, draft, tokenizer), prompts.values()), strict=True)
        )
    held_out = {
        "held_out_loss_generated": Windows(corpus.generated_functions(1000, recipe.seed + 1, held_out=True), tokenizer),
        "held_out_loss_library": Windows(corpus.library_functions(held_out=True), tokenizer),
    }
    for name, windows in held_out.items():
        report[name] = {"target": held_out_loss(target, windows), "draft": held_out_loss(draft, windows)}
    return report


def save(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write an ordinary transformers folder: bfloat16 weights, configuration, generation configuration, tokenizer."""
    model = model.to(torch.bfloat16)
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    model.generation_config = GenerationConfig(**ends)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def say(text: str) -> None:
    print(text, flush=True)


def _sizes(model: PreTrainedModel) -> dict[str, float]:
    count = sum(parameter.numel() for parameter in model.parameters())
    return {"parameters": count, "megabytes": round(2 * count / 1e6, 2)}


def _machine() -> str:
    return (
        f"{os.cpu_count()}-core {platform.machine()} CPU, Python {platform.python_version()}, torch {torch.__version__}"
    )


def data_card(report: dict, recipe: Recipe) -> str:
    """The card that travels with the weights, from what was measured."""

    def row(title: str, *values: float) -> str:
        return (
            f"| {title} | " + " | ".join(f"{value:,.3f}" if value % 1 else f"{value:,.0f}" for value in values) + " |"
        )

    pair = report["target"], report["draft"]
    kinds = report["function_prompts"], report["library_prompts"]
    models = [
        row("parameters", *(model["parameters"] for model in pair)),
        row("weights, MB (bfloat16)", *(model["megabytes"] for model in pair)),
        row("tokens seen", *(model["tokens"] for model in pair)),
        row("steps", *(model["steps"] for model in pair)),
        row("training, seconds", *(model["seconds"] for model in pair)),
        row("training loss, first 10 steps", *(model["first_loss"] for model in pair)),
        row("training loss, last 50 steps", *(model["last_loss"] for model in pair)),
        row("held-out generated functions, nats per token", *report["held_out_loss_generated"].values()),
        row("held-out library functions, nats per token", *report["held_out_loss_library"].values()),
    ]
    accepted = [
        row("α at temperature 0.2", *(kind["alpha"] for kind in kinds)),
        row("greedy agreement", *(kind["greedy_agreement"] for kind in kinds)),
        row("greedy texts that end by themselves within 128 tokens", *(kind["ended"] for kind in kinds)),
        row("mean length of the greedy texts, tokens", *(kind["tokens"] for kind in kinds)),
    ]
    return CARD.read_text(encoding="utf-8").format(
        **report, recipe=recipe, models="\n".join(models), accepted="\n".join(accepted), share=recipe.generated_share
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bass_core.training", description="Train the embedded pair.")
    parser.add_argument("--minutes", type=float, default=Recipe.minutes, help="wall time of everything (%(default)s)")
    parser.add_argument("--seed", type=int, default=Recipe.seed)
    parser.add_argument("--output", type=Path, default=ASSETS, help="folder for target/, draft/ and the data card")
    options = parser.parse_args()
    report = train_pair(Recipe(minutes=options.minutes, seed=options.seed), options.output)
    say(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
