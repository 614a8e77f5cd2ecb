"""The decoding loop: plan, draft, verify, commit. Every row accepts its own number of draft tokens.

`Session` is the stepwise engine, and `generate` is a thin loop over it. Regular decoding is the same loop with draft
length 0. Storage, random numbers and bookkeeping are in other modules; `_decode` reads like the algorithm.
"""

from __future__ import annotations

import functools
import logging
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, PreTrainedModel

from bass_core import checks, options
from bass_core.drafters import Context, Draft, NgramDrafter, Setting
from bass_core.environment import on_stream
from bass_core.exactness.processors import Processor
from bass_core.exactness.verification import HostReport
from bass_core.execution import execution
from bass_core.interrupts import Exclusive, StepRunning, always
from bass_core.loading.measured_costs import policy_for
from bass_core.loading.model_pair import ModelPair
from bass_core.loop.batch import Batch
from bass_core.loop.phases import Listener, Phases
from bass_core.loop.rows import Commit, Prompt, Request, Result, Rows
from bass_core.loop.step import EagerStep, ForcedAcceptance, StepOptions, StepReport, decide
from bass_core.loop.trace import StepEvent, Trace
from bass_core.model import probe
from bass_core.model.runner import Runner
from bass_core.options import Attention, Compile, OnRowError, Options, TraceLevel, Verification, among
from bass_core.policies.protocol import DraftLengthPolicy, FixedLength, own_policy, planned_lengths
from bass_core.prompts import PromptLike, check_context, model_pair, prompt_of

log = logging.getLogger(__name__)


class Session:
    """Batched speculative decoding, one step at a time. Requests may be submitted and cancelled between steps.

    Use a session as a context manager, or call `close`, to free the caches. Options that are not listed here are as in
    `generate`. Raises ValueError or TypeError for unsupported options.

    max_batch_size: number of batch slots. Further requests wait for a batch slot.
    prefill_chunk: chunked prefill. Prompts longer than this many tokens are read in chunks, at most one chunk between
        two decode steps, so that live rows wait only for a chunk. Long prompts are read one after the other. Later
        requests with shorter prompts start in other batch slots. Texts do not change. None: read prompts whole.
    trace: all values except "off" store data of every step while the session is open.
    """

    on_phase: ClassVar[Callable[[Session, int, str], None] | None] = None  # set by `profiling.profile`

    @checks.names_arguments
    def __init__(
        self,
        pair: ModelPair,
        *,
        max_batch_size: int = 8,
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
        eos_token_id: int | Iterable[int] | None = None,
        stop: str | Sequence[str] = (),
        generation_config: GenerationConfig | None = None,
        on_row_error: OnRowError = "raise",
        prefill_chunk: int | None = None,
        trace: TraceLevel = "steps",
    ):
        self.options, self.pair = Options(**among(locals())), model_pair(pair)
        self.asked = self.options.resolved(pair)
        self.policy = policy_for(pair, draft_length)
        paths = [probe.resolve(model, attention) for model in pair.models]  # runs the models, so all other checks first
        how = execution(compile, pair.device, paths, trace, pair.launched_because)
        layers = how.layers(pair.device)
        # Regular decoding calls no drafter. `NgramDrafter` stores nothing per row.
        drafter = NgramDrafter() if self.policy == FixedLength(0) else pair.drafter
        slots, vocabulary = self.options.max_batch_size, self.asked.vocabulary
        self.target = Runner(pair.target, paths[0], slots, layers=layers, keeps_hidden=drafter.wants_hidden)
        shows = {"coupled": verification == "coupled", "show_q": trace == "tokens"}
        self.drafter = drafter.begin(Setting(pair.target, paths, slots, vocabulary, layers=layers, **shows))
        self.rows = Rows(slots, pair.device, vocabulary, self.asked.params, self.asked.begun)
        self.batch = Batch(self.rows, self.target, self.drafter, self.options.prefill_chunk)
        self.trace = Trace(trace, **how.about(pair, paths, self.options, self.asked.params.greedy, self.policy))
        log.info("session of %s, %d batch slots, %s", pair, slots, self.trace.meta)
        me = weakref.ref(self)  # without a reference cycle, a dropped session frees its memory at once
        self.phases = Phases(pair.device, lambda: me()._listener())
        forced = None if acceptance is None else acceptance.on(pair.device)
        rules = self._rules = StepOptions(verification, forced, trace == "tokens", on_row_error == "raise")
        fall_back = functools.partial(self.trace.meta.update, compile="off") if compile == "auto" else None
        self.device_step = how.step(EagerStep(self.rows, self.target, self.drafter, rules, self.phases), fall_back)
        # The stream whose pool holds the session's memory; None on a CPU
        self._stream = torch.cuda.current_stream(pair.device) if pair.device.type == "cuda" else None
        self._step = 0
        self._turn = Exclusive()  # held by the running step
        self._cancelled: deque[tuple[Request, str]] = deque()  # cancelled while a step runs
        # _committing: the host is committing. _uncommitted: the device is ahead of the host.
        self._closed = self._committing = self._uncommitted = False

    # --- requests ---------------------------------------------------------------------------------

    @checks.names_arguments
    def submit(
        self,
        prompt: PromptLike | Prompt,
        *,
        max_new_tokens: int = 128,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        min_p: float | None = None,
        repetition_penalty: float | None = None,
        processors: Sequence[Processor | LogitsProcessor] = (),
        draft_length: int | DraftLengthPolicy | None = None,
        seed: int | None = None,
        sample: int | None = None,
        stop: str | Sequence[str] | None = None,
        stop_token_ids: Iterable[int] = (),
        ignore_eos: bool = False,
        top_logprobs: int = 0,
        row: int | None = None,
        deadline: float | None = None,
    ) -> Request:
        """Queue a request and return its handle. The row starts at the next step with a free batch slot.

        prompt: a text, a conversation, token ids or a source, as in `generate`.
        temperature, top_k, top_p, min_p, repetition_penalty, seed, stop: None uses the session's value. The text is the
        same as in a session with these values. On a GPU, rows with sampling parameters of their own slow steps down.
        processors: applied after those of the session (see `generate`).
        draft_length: 0 opts out of drafting; a number or a policy is used for this row. None: the session's policy.
        sample: selects the random numbers together with the seed; None uses the row id. Equal seed and sample give
        equal texts, under the conditions of `seed` in `generate`.
        stop_token_ids: further ids that end the row, with reason "stop".
        ignore_eos: do not end the row at EOS ids.
        top_logprobs: the handle's `alternatives` list so many likeliest ids per token, with log-probabilities.
        row: id of the row in events and in the trace; None uses a new id.
        deadline: seconds from now after which the row ends with reason "budget".

        Waiting requests with equal prompts share a prefill: for n samples, submit the prompt n times between two steps.
        The handle's `drafted` and `accepted` count the row's draft tokens and accepted tokens so far.

        Raises ValueError or TypeError for an invalid request, RuntimeError after `close`. May be called from other
        threads and during a step.
        """
        self._refuse_closed()
        if not isinstance(prompt, Prompt):
            prompt = prompt_of(self.pair, prompt, self.asked.config)
        max_new_tokens = checks.integer("max_new_tokens", max_new_tokens)
        check_context(self.pair, len(prompt.ids), max_new_tokens)
        params = self.asked.params.changed(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
        sample = None if sample is None else checks.integer("sample", sample)
        stops = options.eos_ids(self.asked.config, stop_token_ids, self.asked.vocabulary, "stop_token_ids")
        ends = ({} if ignore_eos else self.asked.ends) | dict.fromkeys(stops, "stop")
        request = Request(
            prompt=replace(prompt),  # a copy, since waiting rows share the `Prompt` and its prefill
            max_new_tokens=max_new_tokens,
            seed=self.options.seed if seed is None else checks.integer("seed", seed, least=None),
            params=params,
            processors=self.asked.processors(self.pair, prompt.ids, ends, repetition_penalty, processors),
            policy=own_policy(draft_length, self.policy),
            stop=self.asked.stop if stop is None else options.stop_strings(stop, self.pair.tokenizer),
            ends=ends,
            top_logprobs=min(checks.integer("top_logprobs", top_logprobs), self.asked.vocabulary),
            deadline=None if deadline is None else time.monotonic() + checks.seconds("deadline", deadline),
            row=(number := self.rows.number(row)),  # last, so that an invalid request takes no id
            sample=number if sample is None else sample,
        )
        if not request.params.greedy and self.trace.meta["verification"] == "greedy":
            self.trace.meta["verification"] = self.options.verification
        if max_new_tokens == 0:
            request.finish_reason = "length"
        else:
            self.batch.submit(request)
        return request

    @torch.inference_mode()
    def cancel(self, handle: Request, reason: str = "cancelled") -> None:
        """End a row now, or at the end of the running step. The row keeps its tokens.

        Raises TypeError if the argument is no handle, ValueError for a handle of another session."""
        self._check_own(handle)
        if not self._closed:
            self._cancelled.append((handle, reason))
            with suppress(StepRunning), self._alone():
                pass  # `_alone` ends cancelled rows on exit

    @torch.inference_mode()
    def reserve(self, positions: int) -> None:
        """Allocate the memory for rows of `positions` tokens, prompt included, now instead of on demand."""
        with self._alone(), self.target.cache.explaining():
            self.batch.reserve(positions)

    def result(self, handle: Request) -> Result:
        """Return the current result of a row, final if the row has ended. Raises like `cancel`."""
        self._check_own(handle)
        with on_stream(self._stream):
            tokens, logprobs = self.rows.generated(handle)
        text = self.pair.tokenizer and self.pair.tokenizer.decode(tokens, skip_special_tokens=True)
        if text is not None and handle.stop:
            text = handle.stop.cut(text)
        return Result(torch.from_numpy(tokens), text, torch.from_numpy(logprobs), handle.finish_reason)

    def _check_own(self, handle: Request) -> None:
        if not isinstance(handle, Request):
            raise TypeError(f"handle must be a Request returned by submit, got {handle!r}")
        # Checked in the order in which a step in another thread moves a row, so that no move is missed.
        if not (handle in self.rows.waiting or handle in self.rows.live or handle.finish_reason):
            raise ValueError(f"{handle!r} is a row of another session")

    @property
    def idle(self) -> bool:
        """True if no row is live or waiting."""
        return not self.rows.live and not self.rows.waiting and not self._cancelled

    def close(self) -> None:
        """Free the caches now, even if a traceback holds the session. Raises RuntimeError while a step runs."""
        with suppress(torch.AcceleratorError), self._alone():  # the device was lost; the next CUDA call raises
            self._closed = True
            self.device_step.release()
            self.batch.release()
        self._closed = True

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *exc) -> None:
        self.close()

    # --- the loop ---------------------------------------------------------------------------------

    @torch.inference_mode()
    def step(self) -> StepEvent:
        """Run one step: prefill waiting requests if batch slots are free, decode the live rows, or read a prompt chunk.

        Raises FloatingPointError if a model's logits are NaN or infinite; no token of this step is committed. Raises
        RuntimeError while another step runs, and after a step was interrupted during its commit."""
        self._refuse_closed()
        with self._alone():
            return self._next_step()

    def _next_step(self) -> StepEvent:
        if self._committing:
            raise RuntimeError("an earlier step was interrupted during its commit; make a new session")
        if self._uncommitted:
            self._take_back()
        self.batch.compact()  # an interrupted step may have left finished rows
        self.batch.admitting = False
        for request in self.rows.expired():
            self.batch.end(request, "budget")
        with self.target.cache.explaining(), self.target.prepared():
            if self.device_step.is_ahead:
                self._uncommitted = True
                if self.rows.live:
                    return self._decode()
                self._take_back()  # all rows of the overlapped step have ended
            starting, long = self.batch.starting() if self.rows.waiting else [], self.batch.long
            if self.rows.waiting and long.request and (long.turn or not (starting or self.rows.live)):
                return self._read_chunk()
            if starting and (long.admits or not self.rows.live):
                return self._prefill(starting)
            return self._decode() if self.rows.live else StepEvent(self._step, [], [], [], [])

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Exclude other changes of rows. Rows cancelled inside the context end on exit. Raises StepRunning if the
        context is already active, in this thread or another."""
        me = object()

        def leave() -> None:
            if self._turn.held_by(me):
                try:
                    while self._cancelled and not (self._committing or self._closed):
                        self.batch.end(*self._cancelled[0])
                        self._cancelled.popleft()
                finally:
                    self._turn.release(me)

        with on_stream(self._stream), always(leave):
            if not self._turn.acquire(me):
                raise StepRunning("a step of this session is running: wait until it has ended")
            yield

    def _refuse_closed(self) -> None:
        if self._closed:
            raise RuntimeError("the session is closed; make a new session")

    def _decode(self) -> StepEvent:
        self.phases.enter("plan")
        policy = self.rows.policy(self.policy)
        plan = policy.plan(self.rows.view())  # draft length, shared or per row; 0 is regular decoding
        planned, lengths = planned_lengths(plan, self.rows.view())  # [B] each; lengths respects the rows' limits
        context = self.device_step.begin(len(self.rows.live), int(lengths.max()))
        self.phases.enter("draft")
        draft = self.device_step.draft(context, planned, lengths, policy)  # tokens [B, K], q [B, K, V] or None
        self.phases.enter("verify")
        self._uncommitted = True
        report = self.device_step.verify(context, draft)  # advances rows on the device; the host does not wait
        commit = self._commit(context, draft, report)
        drafted, accepted = draft.lengths_host, commit.accepted  # [B]; the drafter and the policy receive copies
        self.drafter.committed(context.lengths_host.copy(), drafted.copy(), accepted.copy())
        policy.update(torch.from_numpy(drafted.copy()), torch.from_numpy(accepted.copy()))
        self.batch.compact()
        self.batch.long.decoded()
        return self._record("decode", planned, context, draft, report.p, commit)

    def _prefill(self, starting: list[Request]) -> StepEvent:
        """Admit waiting rows: one target and one draft pass over new prompts, then the first token of each row."""
        self.phases.enter("prefill")
        with self.batch.admission():
            batch_slots, logits = self.batch.admit(starting)  # logits [B, V]
            self.phases.enter("commit")
            context = self.device_step.context(batch_slots, 0)
            draft = Draft.none(context)
            self._uncommitted = True
            report = decide(self.rows, context, draft, logits[:, None], self._rules)
            commit = self._commit(context, draft, report)
        self.batch.compact()
        self.batch.long.prefilled()
        if self.rows.live:
            self.rows.policy(self.policy).start(self.rows.view())
        return self._record("prefill", np.zeros(len(batch_slots), np.int64), context, draft, report.p, commit)

    def _read_chunk(self) -> StepEvent:
        """Read a chunk of a long prompt with the target and the drafter. No row advances."""
        self.phases.enter("prefill")
        request, chunk = self.batch.read_chunk()
        self.phases.enter("commit")
        self.trace.record_chunk(self._step, request.row, chunk.start, *self.phases.end())
        self._step += 1
        return StepEvent(self._step - 1, [], [], [], [])

    def _commit(self, context: Context, draft: Draft, report: StepReport) -> Commit:
        """Copy the step's report to the host, check the logits, and commit on the host."""
        found = report.on_host()
        self.rows.fetch_ended()
        failed = self._failed_rows(context, found)
        self._committing = True
        commit = self.rows.commit(context.batch_slots, found, draft.lengths_host, failed)
        self._committing = self._uncommitted = False
        return commit

    def _failed_rows(self, context: Context, found: HostReport) -> np.ndarray:
        """Return the rows with NaN or infinite logits, bool [B]; these end with reason "error". Raises
        FloatingPointError if there are any and on_row_error is "raise"."""
        failed = ~(found.target_finite & found.draft_finite)
        if self.options.on_row_error == "raise" and failed.any():
            index = int(failed.argmax())
            role, model = ("draft", self.pair.draft) if found.target_finite[index] else ("target", self.pair.target)
            foreign = "" if isinstance(model, PreTrainedModel) else "(or ids outside the target's vocabulary) "
            row = self.rows.live[context.batch_slots[index]]
            dead = "no token is possible after the row's processors, or " if row.processors else ""
            self._take_back()
            raise FloatingPointError(
                f"{dead}{role} model {type(model).__name__} gave NaN or infinite logits {foreign}"
                f"for row {row.row} at step {self._step}; no token of this step was committed. "
                "Use on_row_error='finish' to end only the affected rows"
            )
        return failed

    def _take_back(self) -> None:
        self.device_step.take_back()
        self._uncommitted = False

    # --- models and trace -------------------------------------------------------------------------

    @contextmanager
    def prepared(self) -> Iterator[None]:
        """Keep both models switched to this session's attention paths for many steps. May be nested."""
        with self.target.prepared(), self.drafter.prepared():
            yield

    def _listener(self) -> Listener | None:
        """Return the current listener for phases, or None."""
        return None if Session.on_phase is None else functools.partial(Session.on_phase, self, self._step)

    def _record(
        self, kind: str, planned: np.ndarray, context: Context, draft: Draft, p: Tensor | None, commit: Commit
    ) -> StepEvent:
        times = self.phases.end() if kind == "decode" else [0.0, 0.0, *self.phases.end()]
        event = self.trace.record_commit(self._step, kind, planned, context, draft, p, commit, times)
        self._step += 1
        log.debug("%s: %s", kind, event)
        return event
