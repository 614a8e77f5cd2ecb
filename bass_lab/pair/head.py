"""Train a feature head for any target, on texts that the target writes: `bass head`.

The target samples texts in large batches. A chat model continues the beginning of its chat template, so the model also
writes the questions (Magpie: Xu et al. 2024). The draft vocabulary holds the most frequent ids of these texts. The head
never drafts other ids, and the target's distribution p is unchanged. Training ends with the time, or when the expected
tokens per step on held-out texts no longer rise.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch
from jinja2 import TemplateError
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from bass_core.drafters import FeatureHead
from bass_core.generation import generate
from bass_core.loading.model_pair import ModelPair
from bass_core.model.architectures import context_length
from bass_lab.pair.feature_head import new_head, save_head, unrolled, unrolled_loss
from bass_lab.pair.fitting import Teacher, optimizers_of, update, workers

LENGTH, PROMPT = 256, 32  # most tokens of a text, and of the part that comes from the user's texts
ROWS = 64  # texts written at once
WRITING = 0.3  # share of the time
WRITTEN_AT = (1.0, 0.4)  # temperatures
BATCH = 8  # windows per optimizer step
LEARNING_RATE = 1e-2
HELD_OUT = 16  # one in so many texts, and at most so many
POSITIONS = 4  # draft positions with a printed acceptance
ROUNDS = 20  # evaluations in the whole time
PATIENCE = 4  # evaluations without a rise before training ends
RISE = 1.002  # smallest rise of the tokens per step that counts
REMEMBERED = 2**30  # bytes of hidden states that are kept

Say = Callable[[str], None]


def train_head(
    pair: ModelPair,
    folder: Path,
    *,
    minutes: float,
    texts: list[str] | None = None,
    vocabulary: int = 16384,
    seed: int = 0,
    say: Say = print,
) -> dict:
    """Train a feature head for the pair's target and write `folder`, for `load_pair(target, draft=folder)`.

    texts: beginnings for the target's texts; None: the chat template or an empty text. vocabulary: most ids to draft.

    Returns written and trained tokens with tokens per second, the number of draft ids, acceptance by position,
    tokens_per_step, memory_gb and seconds. Ctrl-C ends the training early. Raises ValueError without a tokenizer, for
    empty texts, and for other dtypes than float32 and bfloat16.
    """
    started, limit, target = time.monotonic(), 60 * minutes, pair.target
    if target.dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(f"a head is trained in float32 or bfloat16, but the target has {target.dtype}; use dtype=")
    torch.manual_seed(seed)
    length = min(LENGTH, context_length(target) or LENGTH)
    starts = beginnings(pair.tokenizer, texts, length // 2)
    written, speed = write_texts(pair, starts, length, WRITING * limit, seed, say)
    held = min(HELD_OUT, -(-len(written) // HELD_OUT))
    ids = frequent(written, vocabulary, target.get_output_embeddings().weight.shape[0])
    head = new_head(target, _sizes(target), ids)
    kept = written if written.numel() * head.config.hidden_size * 4 <= REMEMBERED else ()
    training = _Training(head, Teacher(target, kept), written[held:], written[:held])
    found = training.run(started + limit, seed, say)
    save_head(head, folder)
    pair.tokenizer.save_pretrained(folder)
    return {
        "written_tokens": written.numel(),
        "written_per_second": speed,
        "draft_ids": len(ids) if ids is not None else head.config.vocab_size,
        **found,
        "memory_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
        "seconds": time.monotonic() - started,
    }


def beginnings(tokenizer: PreTrainedTokenizerBase | None, texts: list[str] | None, most: int) -> list[Tensor]:
    """Return token ids with which the target's texts begin, at most `most` of each. Raises ValueError without tokenizer
    or with empty texts."""
    if tokenizer is None:
        raise ValueError("the target has no tokenizer; add one to its folder")
    if texts is not None:
        found = [ids for text in texts if (ids := tokenizer(text, add_special_tokens=False).input_ids)]
        if not found:
            raise ValueError("the texts are empty; write one text per line")
        return [torch.tensor(ids[: min(PROMPT, most)]) for ids in found]
    opening = _opening(tokenizer) if tokenizer.chat_template else ""
    first = [each for each in (tokenizer.bos_token_id, tokenizer.eos_token_id, 0) if each is not None][:1]
    return [torch.tensor(tokenizer(opening, add_special_tokens=False).input_ids[-most:] or first)]


def _opening(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the text of the chat template before the first user message, empty if the template refuses one."""
    mark = "\N{SNOWMAN}"
    try:
        return tokenizer.apply_chat_template([{"role": "user", "content": mark}], tokenize=False).partition(mark)[0]
    except TemplateError:
        return ""


def write_texts(
    pair: ModelPair, starts: list[Tensor], length: int, seconds: float, seed: int, say: Say
) -> tuple[Tensor, float]:
    """Return texts of the target, [N, length], and the tokens per second. At least one batch is written."""
    alone, began, parts = ModelPair(pair.target), time.monotonic(), []
    while not parts or time.monotonic() - began < seconds * len(parts) / (len(parts) + 1):
        ids = [starts[(len(parts) * ROWS + row) % len(starts)] for row in range(ROWS)]
        out = generate(
            alone,
            ids,
            max_new_tokens=length - min(map(len, ids)),
            temperature=WRITTEN_AT[len(parts) % len(WRITTEN_AT)],
            draft_length=0,
            eos_token_id=(),
            seed=seed + len(parts),
            trace="off",
        )
        rows = zip(ids, out.sequences, strict=True)
        parts.append(torch.stack([torch.cat([start, row])[:length] for start, row in rows]))
    took = time.monotonic() - began
    written = torch.cat(parts)[torch.randperm(len(parts) * ROWS)]
    say(f"the target wrote {len(written)} texts, {written.numel() / took:.0f} tokens/s")
    return written.to(pair.device), written.numel() / took


def frequent(written: Tensor, most: int, vocabulary: int) -> Tensor | None:
    """Return the `most` most frequent ids in ascending order, without absent ids; None if that includes all ids."""
    counts = torch.bincount(written.flatten(), minlength=vocabulary)
    ids = counts.argsort(descending=True, stable=True)[: min(most, int(counts.count_nonzero()))]
    return None if len(ids) == vocabulary else ids.sort().values


def _sizes(target: PreTrainedModel) -> dict:
    """Return the sizes of a layer like the target's own."""
    of = target.config.get_text_config()
    heads, wide = of.num_attention_heads, getattr(of, "intermediate_size", None) or 4 * of.hidden_size
    sizes = {"num_attention_heads": heads, "num_key_value_heads": getattr(of, "num_key_value_heads", None) or heads}
    return sizes | {"intermediate_size": wide, "head_dim": getattr(of, "head_dim", None) or of.hidden_size // heads}


class _Training:
    """Optimizer steps on the target's texts, and evaluations on held-out texts."""

    def __init__(self, head: FeatureHead, teacher: Teacher, texts: Tensor, held_out: Tensor):
        self.head, self.teacher, self.texts, self.held_out = head, teacher, texts, held_out

    def run(self, end: float, seed: int, say: Say) -> dict:
        """Train until `end` (`time.monotonic`) or until the held-out tokens per step no longer rise. The head keeps its
        best weights."""
        head, began = self.head, time.monotonic()
        optimizers, generator = optimizers_of(head, LEARNING_RATE), torch.Generator().manual_seed(seed)
        threads = torch.get_num_threads() if self.texts.device.type == "cpu" else 1
        steps = tokens = worse = 0
        best, best_weights, asked = self.acceptance(), None, began
        with workers(threads) as pool, suppress(KeyboardInterrupt):  # the best weights so far are written
            while (now := time.monotonic()) < end and worse < PATIENCE:
                windows = self.texts[torch.randint(0, len(self.texts), (BATCH,), generator=generator)]
                progress = (now - began) / (end - began)
                head.train()
                update(optimizers, self._loss, windows.chunk(threads), pool, progress, steps)
                steps, tokens = steps + 1, tokens + windows.numel()
                if time.monotonic() - asked > (end - began) / ROUNDS:
                    found, asked = self.acceptance(), time.monotonic()
                    say(f"{progress:.0%}, {tokens / (asked - began):.0f} tokens/s, {described(found)}")
                    worse = 0 if expected(found) > RISE * expected(best) else worse + 1
                    if expected(found) > expected(best):
                        best, best_weights = found, {name: each.clone() for name, each in head.state_dict().items()}
        found = self.acceptance()
        if best_weights is not None and expected(best) > expected(found):
            head.load_state_dict(best_weights)
            found = best
        say(f"held out: {described(found)}")
        speed = tokens / (time.monotonic() - began)
        return {
            "trained_tokens": tokens,
            "trained_per_second": speed,
            "acceptance": found,
            "tokens_per_step": expected(found),
        }

    def _loss(self, windows: Tensor) -> Tensor:
        return unrolled_loss(self.head, self.teacher, windows, WRITTEN_AT)

    @torch.no_grad()
    def acceptance(self) -> list[float]:
        """Return the acceptance probability at temperature 1 by draft position: the mean of Σ min(p, q) on held-out
        texts, whose own tokens are the drafts before."""
        head, sums = self.head.eval(), torch.zeros(POSITIONS)
        half = self.teacher.target.dtype != torch.float32
        for window in self.held_out.split(1):
            with torch.autocast(window.device.type, torch.bfloat16, enabled=half):
                features = self.teacher.states(window)
                p = self.teacher.logits(features).float().softmax(-1)
                p = p if head.rows is None else p[..., head.draft_ids]
                for step, logits in zip(range(POSITIONS), unrolled(head, window, features), strict=False):
                    q = logits.float().softmax(-1)
                    sums[step] += torch.minimum(p[:, step:], q[:, step:]).sum(-1).mean().cpu()
        return (sums / len(self.held_out)).tolist()


def expected(acceptance: list[float]) -> float:
    """Return the expected tokens of a step that drafts one token per position."""
    return 1 + float(torch.tensor(acceptance).cumprod(0).sum())


def described(acceptance: list[float]) -> str:
    by_position = ", ".join(f"{each:.2f}" for each in acceptance)
    return f"acceptance by position {by_position}: {expected(acceptance):.2f} tokens per step"
