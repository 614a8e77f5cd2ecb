"""`generate` continues many prompts; `stream` yields the texts piece by piece. Both are thin loops over `Session`."""

from __future__ import annotations

import asyncio
import collections
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, overload

import pandas as pd
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor

from bass_core import checks
from bass_core.async_session import AsyncSession
from bass_core.detokenizer import FinalText
from bass_core.exactness.processors import Processor
from bass_core.loading.model_pair import ModelPair
from bass_core.loop.rows import Prompt, Request
from bass_core.loop.step import ForcedAcceptance
from bass_core.loop.trace import StepEvent, Trace
from bass_core.options import Attention, Compile, OnRowError, TraceLevel, Verification, among
from bass_core.policies.protocol import DraftLengthPolicy
from bass_core.prompts import PromptLike, prompts_of
from bass_core.session import Result, Session


@dataclass(frozen=True, repr=False)
class Generation:
    """Result of `generate`, with one entry per row. The rows of a prompt are adjacent.

    sequences: int64 ids on the host, without prompt and padding, with the EOS or the last token of a stop string.
    texts: decoded without special tokens, up to the stop string. Raises ValueError without a tokenizer.
    logprobs: log-probability of each token under the target, float32, at temperature 1 and without other processing.
    finish_reasons: "eos", "stop", "length", "budget", "cancelled", "error", or None for an interrupted row.
    trace: the record of all steps.
    samples: rows per prompt.

    A `Generation` is a sequence of `Result`: `out[0].text`, `for row in out`. `by_prompt` groups the rows.
    """

    sequences: list[Tensor]
    decoded: list[str | None]  # `texts`, or None without a tokenizer
    logprobs: list[Tensor]
    finish_reasons: list[str | None]
    trace: Trace
    samples: int = 1

    @classmethod
    def of(cls, session: Session, handles: Sequence[Request], samples: int) -> Generation:
        """Return the current results of these rows of a session."""
        results = [session.result(handle) for handle in handles]
        return cls(*(list(column) for column in zip(*results, strict=True)), session.trace, samples)

    @property
    def synthetic(self) -> bool:
        """True if a model has dummy weights or accepted lengths were drawn. Then only the times are meaningful."""
        return self.trace.synthetic

    def __len__(self) -> int:
        return len(self.sequences)

    @overload
    def __getitem__(self, row: int) -> Result: ...
    @overload
    def __getitem__(self, row: slice) -> list[Result]: ...
    def __getitem__(self, row: int | slice) -> Result | list[Result]:
        """Return a row, or a list of rows for a slice. Raises IndexError beyond the last row."""
        if isinstance(row, slice):
            return list(self)[row]
        return Result(self.sequences[row], self.decoded[row], self.logprobs[row], self.finish_reasons[row])

    def __iter__(self) -> Iterator[Result]:
        return (self[row] for row in range(len(self)))

    @property
    def texts(self) -> list[str]:
        return [row.text for row in self]

    @property
    def by_prompt(self) -> list[list[Result]]:
        """The rows grouped by prompt."""
        rows = list(self)
        return [rows[first : first + self.samples] for first in range(0, len(rows), self.samples)]

    def to_pandas(self) -> pd.DataFrame:
        """Return one line per row: prompt and sample (from 0), text, tokens (their number), logprob (of the whole
        sequence, in nats) and finish_reason."""
        return pd.DataFrame(
            {
                "prompt": [row // self.samples for row in range(len(self))],
                "sample": [row % self.samples for row in range(len(self))],
                "text": self.decoded,
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
    """A Ctrl-C in `generate`. generation: the rows so far; an interrupted row has the finish reason None."""

    def __init__(self, generation: Generation):
        super().__init__("generate was interrupted; the rows so far are in this exception's .generation")
        self.generation = generation


@checks.names_arguments
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
    processors: Sequence[Processor | LogitsProcessor] = (),
    seed: int = 0,
    draft_length: int | DraftLengthPolicy | None = None,
    verification: Verification = "token",
    attention: Attention = "auto",
    compile: Compile = "auto",
    acceptance: ForcedAcceptance | None = None,
    max_batch_size: int | None = None,
    eos_token_id: int | Iterable[int] | None = None,
    stop: str | Sequence[str] = (),
    generation_config: GenerationConfig | None = None,
    time_budget: float | None = None,
    on_row_error: OnRowError = "raise",
    on_step: Callable[[StepEvent], None] | None = None,
    trace: TraceLevel = "steps",
) -> Generation:
    """Continue every prompt by batched speculative decoding. The text has exactly the target model's distribution.

    prompts: a text, a conversation ([{"role": …, "content": …}, …], formatted by the tokenizer's chat template), 1-D
        token ids, or a list of these. Also a tokenizer's output for several texts (padded input_ids, attention_mask). A
        text that begins with the BOS gets no second BOS. An encoder-decoder target takes sources in the same forms; a
        speech model (Whisper) takes features [channels, frames]. A mapping may contain decoder_input_ids to replace the
        start of the text.
    num_return_sequences: samples per prompt. Each prompt is prefilled once.
    temperature (0 = greedy), top_k (0 = off), top_p, min_p, repetition_penalty (None: the model's value): applied in
        transformers' order.
    processors: change the logits by the row's own tokens, after the repetition penalty and before the temperature:
        `Penalties`, `Bias`, `MinTokens`, `bass_lab.Grammar` (JSON by a schema), your own `Processor`, or a
        `LogitsProcessor` of transformers that depends on its own row alone.
    seed: equal seed and output index give the same text in any batch, if the draft length is fixed and the drafter
        reads only the row itself ("suffix" reads all rows), since a sampled text depends on the verified drafts. With
        `verification="coupled"`, the text is the same for every draft and draft length, including 0.
    draft_length: an int for a fixed length (0 is regular decoding), or a policy. None is the default policy: `Goodput`
        if measured costs of the pair are available, else 5. `bass calibrate` measures costs; costs of the embedded pair
        on CPUs are part of the library.
    verification: "token", "block" or "coupled". The text is the same for all three at temperature 0.
    attention: "auto" selects the fastest attention path that passes a check with the models. "ragged", "pad", "split"
        and "eager" select a path, or raise ValueError if the check fails.
    compile: "off" launches operators one by one. "graphs" captures CUDA graphs for each batch size and draft length at
        its first repetition in this call; to decode many short texts in separate calls, keep a `Session`. "compiled"
        runs the models' layers through torch.compile (seconds per shape, once per process). "compiled+graphs" is both,
        and fastest. "auto" is "graphs" on a GPU if the models and options permit, else "off".
    acceptance: None for real acceptance. A `bass_lab.SyntheticAcceptance` draws accepted lengths for benchmarks; texts
        are then meaningless, and `Generation.synthetic` is True.
    max_batch_size: rows decoded at once (None: all). Waiting rows take free batch slots.
    eos_token_id: None for the model's value, () for no EOS.
    stop: strings that end a row. A special token, such as "<|im_end|>", ends the row at this token.
    generation_config: None for the target's own. eos_token_id and repetition_penalty apply unless given in the call,
        and the options with processors (suppressed ids, bad words, minimum lengths, n-grams, a forced first id) always.
        Other options that would change the text raise ValueError, as do lengths and numbers of sequences. Sampling
        parameters with do_sample=True must equal those of the call; the target's own are ignored.
    time_budget: seconds from the call, checked between steps. Rows then end with reason "budget".
    on_row_error: "raise", or "finish" to end rows with NaN logits with reason "error" and continue.
    on_step: called with a StepEvent after each step.
    trace: "off", "steps" or "tokens".

    Raises ValueError or TypeError for invalid input before any forward pass, FloatingPointError for NaN or infinite
    logits. Afterwards, also after an error, the models' state is restored and caches are freed.
    """
    ends = deadline(time_budget)
    ids = prompts_of(pair, prompts, max_new_tokens, generation_config)
    samples = checks.integer("num_return_sequences", num_return_sequences, least=1)
    most = len(ids) * samples if max_batch_size is None else max_batch_size
    with Session(pair, **among(locals()) | {"max_batch_size": most}) as session:
        handles = _submit(session, ids, samples, max_new_tokens)

        try:
            # Without `on_step`, switch the models once. A callback must find the models in the owner's state.
            with session.prepared() if on_step is None else nullcontext():
                for event in steps_until(session, handles, ends):
                    if on_step is not None:
                        on_step(event)
        except KeyboardInterrupt as interrupt:
            raise Interrupted(Generation.of(session, handles, samples)) from interrupt
        return Generation.of(session, handles, samples)


@checks.names_arguments
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
    """Yield (row, text) when more text of a row is final. The joined pieces of a row are the row's text.

    Arguments and row numbers as in `generate`, without `on_step`. Text that may still change is held back (see
    `FinalText`). Leaving the loop ends the decoding. Invalid arguments raise at the call, as in `generate`. Raises
    ValueError for a pair without a tokenizer.
    """
    ends = deadline(time_budget)
    ids, samples, most = _read(pair, prompts, num_return_sequences, max_new_tokens, max_batch_size, options)
    session = Session(pair, max_batch_size=most, **options)
    return _pieces(session, _submit(session, ids, samples, max_new_tokens), ends)


@checks.names_arguments
async def astream(
    pair: ModelPair,
    prompts: PromptLike | Sequence[PromptLike],
    *,
    num_return_sequences: int = 1,
    max_new_tokens: int = 128,
    max_batch_size: int | None = None,
    time_budget: float | None = None,
    **options: Any,
) -> AsyncIterator[tuple[int, str]]:
    """`stream` for `async for`, by an `AsyncSession`. Several streams of a pair may run at the same time."""
    ends = deadline(time_budget)
    asked = (pair, prompts, num_return_sequences, max_new_tokens, max_batch_size, options)
    ids, samples, most = await asyncio.to_thread(_read, *asked)
    async with AsyncSession(pair, max_batch_size=most, **options) as session:
        left = None if ends is None else max(0.0, ends - time.monotonic())
        own = {"max_new_tokens": max_new_tokens, "deadline": left}
        job = session.start([(each, own) for each in ids for _ in range(samples)])
        async for piece in job.texts():
            yield piece


def deadline(time_budget: float | None) -> float | None:
    """Return the `time.monotonic()` at which a call that begins now must end."""
    return None if time_budget is None else time.monotonic() + checks.seconds("time_budget", time_budget)


def _read(
    pair: ModelPair, prompts: Any, samples: int, new: int, most: int | None, options: Mapping[str, Any]
) -> tuple[list[Prompt], int, int]:
    """Return the prompts of a stream, the samples per prompt, and the batch size. Raises ValueError or TypeError."""
    ids = prompts_of(pair, prompts, new, options.get("generation_config"))
    if pair.tokenizer is None:
        raise ValueError("stream yields texts, but the pair has no tokenizer; use ModelPair(..., tokenizer=...)")
    samples = checks.integer("num_return_sequences", samples, least=1)
    return ids, samples, len(ids) * samples if most is None else most


def _submit(session: Session, prompts: Sequence[Prompt], samples: int, max_new_tokens: int) -> list[Request]:
    handles = [session.submit(prompt, max_new_tokens=max_new_tokens) for prompt in prompts for _ in range(samples)]
    session.reserve(max(handle.limit for handle in handles))
    return handles


def steps_until(session: Session, handles: Sequence[Request], ends: float | None) -> Iterator[StepEvent]:
    """Run and yield steps until all rows have ended or the time `ends` has come."""
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
        for row, text in enumerate(texts):  # rows that ended by the time budget
            if piece := text.feed(ended=True):
                yield row, piece
