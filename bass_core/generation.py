"""`generate`: many prompts in, their continuations out; a thin loop over `Session`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

from torch import Tensor
from transformers import GenerationConfig

from bass_core import inputs
from bass_core.draft_length import DraftLengthPolicy
from bass_core.engine import Session, StepEvent
from bass_core.models import ModelPair
from bass_core.trace import Trace


@dataclass(frozen=True)
class Generation:
    """What `generate` returns; one entry per row, prompt-major.

    sequences: int64 ids on the host, prompt not included, no padding, with the EOS or the token that completed a stop.
    texts: special tokens skipped, ending before the stop string; None without a tokenizer.
    logprobs: the target's log-probability of each token, float32 (temperature 1, unprocessed).
    finish_reasons: "eos", "stop", "length", "budget", "cancelled" or "error".
    trace: what happened at each step.
    """

    sequences: list[Tensor]
    texts: list[str | None]
    logprobs: list[Tensor]
    finish_reasons: list[str]
    trace: Trace

    @property
    def synthetic(self) -> bool:
        """Whether models had dummy weights or accepted counts were drawn: then only the times mean something."""
        return self.trace.synthetic


def generate(
    pair: ModelPair,
    prompts: inputs.PromptLike | Sequence[inputs.PromptLike],
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
    acceptance: str | None = None,
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
        their attention_mask). A text that begins with the BOS is not given a second one.
    num_return_sequences: samples per prompt; a prompt is prefilled once.
    temperature (0 = greedy), top_k (0 = off), top_p, min_p, repetition_penalty (None: the model's own): as in
        transformers, same order.
    seed: same seed and place among the outputs, same text, whatever else is in the batch, where the draft length is a
        number: policies look at other rows, and a sampled text depends on the drafts it was checked against. With
        `verification="coupled"` the text is the same whatever the draft and its length, 0 included.
    draft_length: an int for a fixed length, 0 for regular decoding, or a policy. None: `Goodput` where the pair's costs
        on this device are known (`bass calibrate`; those of the embedded pair on CPUs ship with the library), else 5.
    verification: "token", "block" or "coupled" (one and the same at temperature 0).
    attention: "auto" takes the best path that the models pass; "ragged", "pad", "split", "eager" are taken or refused.
    compile: "off" launches a step's work operation by operation. "graphs" records it as CUDA graphs, one for the draft
        phase and one for the rest per batch size and draft length, when they first occur. "compiled" sends the models'
        layers through torch.compile (seconds per shape, once per process). "compiled+graphs" is both, the fastest.
        "auto" is "graphs" on a GPU where nothing stands against it, else "off".
    acceptance: None: earned. "synthetic:0.8" draws how many drafts each row keeps, to measure with
        (`SyntheticAcceptance`); texts then mean nothing, and `Generation.synthetic` is true.
    max_batch_size: rows decoded at once (None: all); waiting rows take freed places.
    eos_token_id: None for the model's own, () to stop on none. stop: strings that end a row.
    generation_config: whose eos_token_id and repetition_penalty count unless they are given here, and whose other
        options that would change the text are refused by name; None: the target's own. Whether and how to sample is
        said here alone.
    time_budget: seconds from the call, checked between steps; rows then end with reason "budget".
    on_row_error: "raise", or "finish" to end a row whose logits are NaN with reason "error" and go on.
    on_step: called with a StepEvent after each step. trace: "off", "steps" or "tokens".

    Raises ValueError / TypeError for input that cannot be honoured, before any forward pass; FloatingPointError for
    logits that are not numbers. Models are left as they were found, caches are freed, also after an error.
    """
    started = time.monotonic()
    prompts = inputs.token_ids(inputs.model_pair(pair), inputs.prompt_list(prompts))
    samples = inputs.integer("num_return_sequences", num_return_sequences, least=1)
    for index, prompt in enumerate(prompts):
        with inputs.saying_which(index):
            inputs.check_context(pair, len(prompt), inputs.integer("max_new_tokens", max_new_tokens))
    budget = None if time_budget is None else inputs.seconds("time_budget", time_budget)
    with Session(
        pair,
        max_batch_size=len(prompts) * samples if max_batch_size is None else max_batch_size,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        seed=seed,
        draft_length=draft_length,
        verification=verification,
        attention=attention,
        compile=compile,
        acceptance=acceptance,
        eos_token_id=eos_token_id,
        stop=stop,
        generation_config=generation_config,
        on_row_error=on_row_error,
        trace=trace,
    ) as session:
        handles = [session.submit(prompt, max_new_tokens=max_new_tokens) for prompt in prompts for _ in range(samples)]
        session.reserve(max(handle.limit for handle in handles))
        # What `on_step` calls finds the models as their owner left them, at the price of switching them at each step.
        with session.prepared() if on_step is None else nullcontext():
            while not session.idle:
                if budget is not None and time.monotonic() - started >= budget:
                    for handle in handles:
                        session.cancel(handle, "budget")
                    break
                event = session.step()
                if on_step is not None:
                    on_step(event)
        results = [session.result(handle) for handle in handles]
        return Generation(*(list(column) for column in zip(*results, strict=True)), session.trace)
