"""Align a draft with its target live: a minute of what `training` does at length."""

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

GENERATED = 8_000  # functions beside those of the library
LENGTH, PROMPT = 256, 32  # tokens of a window, and of what the target continues
BATCH = 8  # windows of a step
SEEN = 3  # times that the draft sees a window, two where it has own texts, too; the target, slower, reads each once
AT_ONCE = 24  # texts that a thread writes together
TEMPERATURES = (1.0,)  # that the draft learns at; with 0.4, too, α gained less in more time
LEARNING_RATE = 7e-3  # with 1e-2 it forgets more of other texts: α on mini fell by 0.22, not 0.14


def align(
    pair: ModelPair,
    texts: Sequence[str] | None = None,
    *,
    tokens: int = 750_000,
    own_texts: int = 96,
    seed: int = 0,
    progress: Callable[[str, float], None] = lambda stage, share: None,
) -> ModelPair:
    """The pair with a copy of its draft that has learned the target's probabilities (distillation: Hinton et al. 2015;
    on the target's own texts: DistillSpec, Zhou et al. 2023).

    texts: what the draft learns on; elsewhere it may become worse. None: functions such as the embedded target was
    trained on (not the modules of the prompt set "library"). The target continues `own_texts` of them, a third of the
    windows.
    tokens: of all windows learned from; hidden states of a third are kept in memory. progress(stage, share): "writing"
    or "learning".

    Raises ValueError for a pair without a draft model or a tokenizer, one that reads sources, another vocabulary, no
    tokens, no texts, and texts shorter than a window of 256 tokens together.
    """
    _check(pair, tokens, own_texts)
    if texts is not None and (isinstance(texts, str) or not len(texts)):
        raise ValueError(f"texts must be a list of texts, one at least, got {texts!r:.40}")
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
        raise ValueError("align goes over texts alone, and this pair's target reads sources")
    if pair.tokenizer is None:
        raise ValueError("align needs a pair with a tokenizer, got none: ModelPair(target, draft, tokenizer)")
    sizes = [model.config.get_text_config().vocab_size for model in (pair.draft, pair.target)]
    if sizes[0] != sizes[1]:
        raise ValueError(f"draft has {sizes[0]} tokens and target {sizes[1]}: align needs one vocabulary")
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
    """Windows [count, LENGTH] that begin as given texts and go on as the target would, half of them nearly greedy."""
    prompts = windows.take(count, PROMPT, generator).to(target.device)
    halves = zip(prompts.chunk(2), (0.2, 1.0), strict=False)  # of one text there is no second half
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
