"""Align a draft model with its target in about a minute: a short version of the alignment in `training`."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from bass_core.loading.model_pair import ModelPair
from bass_lab.pair.fitting import Teacher, distillation_loss, fit, quick, quick_norms, seeds_of, workers, write_texts
from bass_lab.pair.windows import Windows
from bass_lab.texts import corpus

GENERATED = 8_000  # generated functions, next to the library's functions
LENGTH, PROMPT = 256, 32  # tokens of a window, and of a prompt for the target
BATCH = 8  # windows per step
SEEN = 3  # passes of the draft over each window, two with own texts; the slower target reads a window once
AT_ONCE = 24  # texts per batch of a thread
TEMPERATURES = (1.0,)  # a second temperature of 0.4 gained less α in more time
LEARNING_RATE = 7e-3  # 1e-2 forgets more: α on mini fell by 0.22 instead of 0.14


def align(
    pair: ModelPair,
    texts: Sequence[str] | None = None,
    *,
    tokens: int = 750_000,
    own_texts: int = 96,
    seed: int = 0,
    progress: Callable[[str, float], None] = lambda stage, share: None,
) -> ModelPair:
    """Return the pair with a copy of its draft, distilled from the target's probabilities (Hinton et al. 2015), also on
    the target's own texts (DistillSpec, Zhou et al. 2023).

    texts: training texts; on other texts the draft may become worse. None: functions like the embedded target's
    training data, without the modules of the prompt set "library". The target continues `own_texts` of these texts, for
    a third of the windows.
    tokens: training tokens; a third of their hidden states is kept in memory. progress(stage, share): "writing" or
    "learning".

    Raises ValueError for a pair without a draft model or tokenizer, an encoder-decoder pair, different vocabularies, no
    tokens, no texts, and fewer than 256 tokens of text.
    """
    _check(pair, tokens, own_texts)
    if texts is not None and (isinstance(texts, str) or not len(texts)):
        raise ValueError(f"texts must be a non-empty list of texts, got {texts!r:.40}")
    if texts is None:
        texts = [*corpus.library_functions(), *corpus.generated_functions(GENERATED, seed)]
    windows = Windows(list(texts), pair.tokenizer)
    with quick(pair.target, whole_windows=False):
        own = _own_texts(pair.target, windows, own_texts, torch.Generator().manual_seed(seed + 1), progress)
    learner = copy.deepcopy(pair.draft).float()
    quick_norms(learner)
    pool = windows.take(max(tokens // (SEEN * LENGTH), BATCH), LENGTH, torch.Generator().manual_seed(seed + 2))
    teacher = Teacher(pair.target, [*pool, *own])

    def batches(share: float, generator: torch.Generator) -> Tensor:
        progress("learning", share)
        if len(own) and torch.rand(1, generator=generator) < 1 / 3:
            return own[torch.randint(len(own), (BATCH,), generator=generator)]
        return pool[torch.randint(len(pool), (BATCH,), generator=generator)]

    with tempfile.TemporaryDirectory() as folder, quick(pair.target, whole_windows=True):
        fit(
            learner,
            lambda batch: distillation_loss([learner], teacher, batch, TEMPERATURES),
            batches,
            tokens=tokens,
            lr=LEARNING_RATE,
            name="alignment",
            data=(),
            seed=seed,
            threads=torch.get_num_threads(),
            folder=Path(folder),
            tell=lambda text: None,
        )
    progress("learning", 1.0)
    aligned = copy.deepcopy(pair.draft)
    aligned.load_state_dict(learner.state_dict())
    return ModelPair(pair.target, aligned, pair.tokenizer)


def _check(pair: ModelPair, tokens: int, own_texts: int) -> None:
    if not isinstance(pair.draft, PreTrainedModel):
        raise ValueError(f"align needs a pair with a draft model to align, got {type(pair.drafter).__name__}")
    if pair.reads_sources:
        raise ValueError("align needs a decoder-only target, and this pair's target is an encoder-decoder model")
    if pair.tokenizer is None:
        raise ValueError("align needs a pair with a tokenizer: write ModelPair(target, draft, tokenizer)")
    sizes = [model.config.get_text_config().vocab_size for model in (pair.draft, pair.target)]
    if sizes[0] != sizes[1]:
        raise ValueError(f"align needs one vocabulary, got {sizes[0]} draft ids and {sizes[1]} target ids")
    if tokens < 1 or own_texts < 0:
        raise ValueError(
            f"tokens must be positive and own_texts at least 0, got tokens={tokens}, own_texts={own_texts}"
        )


def _own_texts(
    target: PreTrainedModel,
    windows: Windows,
    count: int,
    generator: torch.Generator,
    progress: Callable[[str, float], None],
) -> Tensor:
    """Return windows [count, LENGTH]: beginnings of texts, continued by the target, half of them nearly greedily."""
    prompts = windows.take(count, PROMPT, generator).to(target.device)
    halves = zip(prompts.chunk(2), (0.2, 1.0), strict=False)  # a single text has no second half
    parts = [(part, temperature) for half, temperature in halves for part in half.split(AT_ONCE) if len(part)]

    def write(part: tuple[Tensor, float], seed: int) -> Tensor:
        return write_texts(target, part[0], LENGTH, part[1], seed)

    written = [prompts.new_empty(0, LENGTH)]
    with workers(torch.get_num_threads()) as pool:
        for text in pool.map(write, parts, seeds_of(parts, generator)):
            progress("writing", (len(written) - 1) / len(parts))
            written.append(text)
    progress("writing", 1.0)
    return torch.cat(written).cpu()
