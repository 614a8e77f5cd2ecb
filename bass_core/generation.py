"""`generate`: many prompts in, their continuations out; `stream`: piece by piece. Thin loops over `Session`."""

from __future__ import annotations

import asyncio
import collections
import inspect
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, overload

import pandas as pd
from torch import Tensor
from transformers import GenerationConfig

from bass_core import checks
from bass_core.detokenizer import FinalText
from bass_core.loading.model_pair import ModelPair
from bass_core.loop.rows import Prompt, Request
from bass_core.loop.step import ForcedAcceptance
from bass_core.loop.trace import StepEvent, Trace
from bass_core.options import among
from bass_core.policies.protocol import DraftLengthPolicy
from bass_core.prompts import PromptLike, prompts_of
from bass_core.session import Result, Session


@dataclass(frozen=True, repr=False)
class Generation:
    """What `generate` returns; one entry per row, prompt-major.

    sequences: int64 ids on the host, prompt not included, no padding, with the EOS or the token that completed a stop.
    texts: special tokens skipped, ending before the stop string; None without a tokenizer.
    logprobs: the target's log-probability of each token, float32 (temperature 1, unprocessed but for ids that the
        generation_config never allows, which have none).
    finish_reasons: "eos", "stop", "length", "budget", "cancelled", "error", or None for a row that was interrupted.
    trace: what happened at each step.
    samples: rows per prompt.

    A sequence of rows, each a `Result`: `out[0].text`, `for row in out`; `by_prompt` has them prompt by prompt.
    """

    sequences: list[Tensor]
    texts: list[str | None]
    logprobs: list[Tensor]
    finish_reasons: list[str | None]
    trace: Trace
    samples: int = 1

    @classmethod
    def of(cls, session: Session, handles: Sequence[Request], samples: int) -> Generation:
        """What these rows of a session have so far, or in the end."""
        results = [session.result(handle) for handle in handles]
        return cls(*(list(column) for column in zip(*results, strict=True)), session.trace, samples)

    @property
    def synthetic(self) -> bool:
        """Whether models had dummy weights or accepted counts were drawn: then only the times mean something."""
        return self.trace.synthetic

    def __len__(self) -> int:
        return len(self.sequences)

    @overload
    def __getitem__(self, row: int) -> Result: ...
    @overload
    def __getitem__(self, row: slice) -> list[Result]: ...
    def __getitem__(self, row: int | slice) -> Result | list[Result]:
        """Raises IndexError beyond the last row."""
        if isinstance(row, slice):
            return list(self)[row]
        return Result(self.sequences[row], self.texts[row], self.logprobs[row], self.finish_reasons[row])

    def __iter__(self) -> Iterator[Result]:
        return (self[row] for row in range(len(self)))

    @property
    def by_prompt(self) -> list[list[Result]]:
        """The rows of each prompt."""
        rows = list(self)
        return [rows[first : first + self.samples] for first in range(0, len(rows), self.samples)]

    def to_pandas(self) -> pd.DataFrame:
        """One line per row: prompt and sample (from 0), text, tokens (how many), logprob (of all of them, in nats) and
        finish_reason."""
        return pd.DataFrame(
            {
                "prompt": [row // self.samples for row in range(len(self))],
                "sample": [row % self.samples for row in range(len(self))],
                "text": self.texts,
                "tokens": [len(sequence) for sequence in self.sequences],
                "logprob": [float(logprobs.sum()) for logprobs in self.logprobs],
                "finish_reason": self.finish_reasons,
            }
        )

    def __repr__(self) -> str:
        reasons = collections.Counter(reason or "interrupted" for reason in self.finish_reasons)
        ended = ", ".join(f"{count} {reason}" for reason, count in reasons.most_common())
        tokens, prompts = sum(map(len, self.sequences)), len(self) // self.samples
        synthetic = ", synthetic" if self.synthetic else ""
        return f"Generation({len(self)} rows of {prompts} prompts, {tokens} tokens; ended: {ended}{synthetic})"


class Interrupted(KeyboardInterrupt):
    """A Ctrl-C in `generate`. generation: the rows so far; None is the finish reason of those that had not ended."""

    def __init__(self, generation: Generation):
        super().__init__("generate was interrupted; the rows so far are in this exception's .generation")
        self.generation = generation


def generate(
    pair: ModelPair,
    prompts: PromptLike | Sequence[PromptLike],
    *,
    num_return_sequences: int = 1,
    max_new_tokens: int = 128,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    repetition_penalty: float | None = None,
    seed: int = 0,
    draft_length: int | DraftLengthPolicy | None = None,
    verification: str = "token",
    attention: str = "auto",
    compile: str = "auto",
    acceptance: ForcedAcceptance | None = None,
    max_batch_size: int | None = None,
    eos_token_id: int | Iterable[int] | None = None,
    stop: str | Sequence[str] = (),
    generation_config: GenerationConfig | None = None,
    time_budget: float | None = None,
    on_row_error: str = "raise",
    on_step: Callable[[StepEvent], None] | None = None,
    trace: str = "steps",
) -> Generation:
    """Continue every prompt by batched speculative decoding; the text has the target model's law exactly.

    prompts: a text, a conversation ([{"role": …, "content": …}, …], written out by the tokenizer's chat template), 1-D
        token ids, or a list of these; or what a tokenizer returned of several texts, padding and all (input_ids with
        their attention_mask). A text that begins with the BOS is not given a second one. Of an encoder-decoder target:
        sources in the same forms, or features [channels, frames] of one that hears (Whisper); mappings may bring
        decoder_input_ids, with which the text begins in place of the model's own start.
    num_return_sequences: samples per prompt; a prompt is prefilled once.
    temperature (0 = greedy), top_k (0 = off), top_p, min_p, repetition_penalty (None: the model's own): as in
        transformers, same order.
    seed: the same seed and place among the outputs give the same text, whatever else is in the batch, if the draft
        length is a number and the drafter reads its own row alone ("suffix" reads all rows): a sampled text depends on
        the drafts that were verified. With `verification="coupled"` the text is the same for every draft and draft
        length, 0 included.
    draft_length: an int for a fixed length, 0 for regular decoding, or a policy. None: `Goodput` where the pair's costs
        on this device are known (`bass calibrate`; those of the embedded pair on CPUs ship with the library), else 5.
    verification: "token", "block" or "coupled" (one and the same at temperature 0).
    attention: "auto" takes the best path that the models pass; "ragged", "pad", "split", "eager" are taken or refused.
    compile: "off" launches a step's work operation by operation. "graphs" records it as CUDA graphs, one for the draft
        phase and one for the rest per batch size and draft length, when they first occur in this call (to decode many
        short texts, one call after the other, keep a `Session`). "compiled" sends the models'
        layers through torch.compile (seconds per shape, once per process). "compiled+graphs" is both, the fastest.
        "auto" is "graphs" on a GPU where nothing stands against it, else "off".
    acceptance: None: earned. A `bass_lab.SyntheticAcceptance` draws how many drafts each row keeps, to measure with;
        texts then mean nothing, and `Generation.synthetic` is true.
    max_batch_size: rows decoded at once (None: all); waiting rows take freed places.
    eos_token_id: None for the model's own, () to stop on none. stop: strings that end a row; one
        that is a special token, such as "<|im_end|>", ends it where the token occurs.
    generation_config: whose eos_token_id and repetition_penalty count unless they are given here, and whose other
        options that would change the text are refused by name, as are those that say how long and how many, and
        sampling (do_sample=True) other than the call's; None: the target's own, of which sampling is not read.
    time_budget: seconds from the call, checked between steps; rows then end with reason "budget".
    on_row_error: "raise", or "finish" to end a row whose logits are NaN with reason "error" and go on.
    on_step: called with a StepEvent after each step. trace: "off", "steps" or "tokens".

    Raises ValueError / TypeError for input that cannot be honoured, before any forward pass; FloatingPointError for
    logits that are not numbers. Models are left as they were found, caches are freed, also after an error.
    """
    ends = deadline(time_budget)
    ids = prompts_of(pair, prompts, max_new_tokens, generation_config)
    samples = checks.integer("num_return_sequences", num_return_sequences, least=1)
    most = len(ids) * samples if max_batch_size is None else max_batch_size
    with Session(pair, **among(locals()) | {"max_batch_size": most}) as session:
        handles = _submit(session, ids, samples, max_new_tokens)

        try:
            # What `on_step` calls finds the models as their owner left them, at the price of switching at each step.
            with session.prepared() if on_step is None else nullcontext():
                for event in steps_until(session, handles, ends):
                    if on_step is not None:
                        on_step(event)
        except KeyboardInterrupt as interrupt:
            raise Interrupted(Generation.of(session, handles, samples)) from interrupt
        return Generation.of(session, handles, samples)


def stream(
    pair: ModelPair,
    prompts: PromptLike | Sequence[PromptLike],
    *,
    num_return_sequences: int = 1,
    max_new_tokens: int = 128,
    max_batch_size: int | None = None,
    time_budget: float | None = None,
    **options: Any,
) -> Iterator[tuple[int, str]]:
    """Yield (row, text) as the text of rows becomes final: the next piece of that row, never taken back.

    Arguments as in `generate` (but for `on_step`), rows numbered as there; a row's pieces, joined, are its text. What
    may still change is held back (`FinalText`, which does so for rows of a `Session`). Leaving the loop ends the
    decoding. Raises at once what `generate` raises before its first pass, and ValueError for a pair without a
    tokenizer.
    """
    if unknown := [name for name in options if name not in inspect.signature(Session).parameters]:
        raise TypeError(f"stream() got an unexpected keyword argument {unknown[0]!r}; it takes those of generate()")
    ends = deadline(time_budget)
    ids = prompts_of(pair, prompts, max_new_tokens, options.get("generation_config"))
    if pair.tokenizer is None:
        raise ValueError("stream yields texts, and the pair has no tokenizer: ModelPair(..., tokenizer=...)")
    samples = checks.integer("num_return_sequences", num_return_sequences, least=1)
    most = len(ids) * samples if max_batch_size is None else max_batch_size
    session = Session(pair, max_batch_size=most, **options)
    return _pieces(session, _submit(session, ids, samples, max_new_tokens), ends)


async def astream(
    pair: ModelPair, prompts: PromptLike | Sequence[PromptLike], **options: Any
) -> AsyncIterator[tuple[int, str]]:
    """`stream` for `async for`: steps run in a thread, one after the other, and the event loop goes on meanwhile.

    Models decode for one stream at a time: give several prompts to one, or each stream models of its own.
    """
    pieces, waiting = stream(pair, prompts, **options), None
    try:
        while True:
            # A future, and no task: `asyncio.run`, when it ends early, cancels all of these, whatever they wait for.
            waiting = asyncio.get_running_loop().run_in_executor(None, next, pieces, None)
            if (piece := await asyncio.shield(waiting)) is None:
                return
            yield piece
    finally:
        if waiting is not None:
            await asyncio.wait([waiting])  # cancelled: the step that runs ends first
        pieces.close()


def deadline(time_budget: float | None) -> float | None:
    """The clock at which a call that begins now ends."""
    return None if time_budget is None else time.monotonic() + checks.seconds("time_budget", time_budget)


def _submit(session: Session, prompts: Sequence[Prompt], samples: int, max_new_tokens: int) -> list[Request]:
    handles = [session.submit(prompt, max_new_tokens=max_new_tokens) for prompt in prompts for _ in range(samples)]
    session.reserve(max(handle.limit for handle in handles))
    return handles


def steps_until(session: Session, handles: Sequence[Request], ends: float | None) -> Iterator[StepEvent]:
    """Steps until all rows have ended, or the clock says so."""
    while not session.idle:
        if ends is not None and time.monotonic() >= ends:
            for handle in handles:
                session.cancel(handle, "budget")
            return
        yield session.step()


def _pieces(session: Session, handles: Sequence[Request], ends: float | None) -> Iterator[tuple[int, str]]:
    with session:
        texts = [FinalText(session.pair.tokenizer, handle.stop) for handle in handles]
        for event in steps_until(session, handles, ends):
            for row, new in zip(event.rows, event.new_tokens, strict=True):
                if piece := texts[row].feed(new, ended=handles[row].finish_reason is not None):
                    yield row, piece
        for row, text in enumerate(texts):  # those that the clock has ended
            if piece := text.feed(ended=True):
                yield row, piece
