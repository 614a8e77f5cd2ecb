"""Timed runs of methods on the same prompts: one after the other, or interleaved step by step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel, StoppingCriteriaList
from transformers.utils import logging as transformers_logging

from bass_core.environment import synchronize
from bass_core.generation import Generation
from bass_core.loading.model_pair import ModelPair
from bass_core.loop.trace import Trace
from bass_core.session import Session
from bass_lab.checks import plain_decoding
from bass_lab.kept_session import KeptSession
from bass_lab.measure.clocks import Clock, Elapsed

Decode = KeptSession | Callable[..., list[Tensor]]  # a method of this engine, or of transformers
Timed = tuple[str, float, Clock, Trace | None]  # name, seconds, clock, and trace (None: transformers)


@dataclass(frozen=True)
class Method:
    """A method to time. k: draft length; None for a policy or without drafts. drafter: None for the pair's drafter."""

    k: int | None
    open: Callable[[], AbstractContextManager[Decode]]
    drafter: str | None = None


def texts(decode: Decode, ids: Sequence[Tensor], clock: Clock, **options: int) -> Generation | list[Tensor]:
    """Decode these token ids. options: max_new_tokens and seed."""
    if isinstance(decode, KeptSession):
        return decode(ids, on_step=clock.stepped, **options)
    return decode(ids, clock=clock, **options)


def one_by_one(
    decodes: Mapping[str, Decode], ids: Sequence[Tensor], device: torch.device, **options
) -> Iterator[Timed]:
    """Run and time each method as a whole. options: of `texts`."""
    for name, decode in decodes.items():
        clock = Clock()
        with Elapsed(device) as elapsed:
            out = texts(decode, ids, clock, **options)
        yield name, elapsed.seconds, clock, out.trace if isinstance(out, Generation) else None


def in_turns(decodes: Mapping[str, Decode], ids: Sequence[Tensor], device: torch.device, **options) -> Iterator[Timed]:
    """Run and time all methods interleaved. The method with the fewest emitted tokens takes the next step, so all
    methods decode the same part of a text at the same time. Raises ValueError for methods of transformers."""
    if peers := [name for name, decode in decodes.items() if not isinstance(decode, KeptSession)]:
        raise ValueError(f"take_turns needs methods of this engine (regular, single, batched); remove {peers}")
    names, seed = list(decodes), options["seed"]
    names = names[seed % len(names) :] + names[: seed % len(names)]  # the first method changes with the seed
    with ExitStack() as stack:  # sessions must undo their changes to the models in reverse order
        runs = {name: _Run(decodes[name], ids, stack, **options) for name in names}
        while going := [run for run in runs.values() if not run.session.idle]:
            min(going, key=lambda run: run.emitted).step()
        for name in decodes:
            yield name, runs[name].seconds, runs[name].clock, runs[name].session.trace


class _Run:
    """A `generate` call that runs one step at a time. Only its own steps are timed."""

    def __init__(self, kept: KeptSession, ids: Sequence[Tensor], stack: ExitStack, *, seed: int, max_new_tokens: int):
        """stack: closes the session."""
        self.device, self.clock, self.seconds, self.emitted = kept.pair.device, Clock(), 0.0, 0
        with self._turn():
            if kept.session is not None:
                self.handles = kept.submit(ids, max_new_tokens=max_new_tokens, seed=seed)
                self.session = kept.session
            else:
                self.session = stack.enter_context(Session(kept.pair, seed=seed, **kept.options))
                self.handles = [self.session.submit(row, max_new_tokens=max_new_tokens) for row in ids]
                self.session.reserve(max(handle.limit for handle in self.handles))
            stack.enter_context(self.session.prepared())

    def step(self) -> None:
        """Take a step. The last step also fetches the results."""
        with self._turn():
            event = self.session.step()
            self.clock.stepped(event)
            if self.session.idle:
                for handle in self.handles:
                    self.session.result(handle)
        self.emitted += sum(map(len, event.new_tokens))

    @contextmanager
    def _turn(self) -> Iterator[None]:
        with Elapsed(self.device) as turn:
            self.clock.away = turn.started - self.seconds
            yield
        self.seconds += turn.seconds


# --- transformers ---------------------------------------------------------------------------------


@torch.inference_mode()
def transformers_generate(
    pair: ModelPair,
    ids: Sequence[Tensor],
    *,
    max_new_tokens: int,
    temperature: float,
    seed: int,
    clock: Clock,
    rows: Sequence[int] | None = None,
    **options,
) -> list[Tensor]:
    """Return the generated ids per row of `transformers.generate` on the left-padded batch, without stopping at EOS.
    ids: 1-D tensors of token ids."""
    width, rows = max(map(len, ids)), range(len(ids)) if rows is None else rows
    padded = torch.stack([torch.nn.functional.pad(row, (width - len(row), 0)) for row in ids]).to(pair.device)
    mask = torch.stack([torch.arange(width) >= width - len(row) for row in ids]).long().to(pair.device)
    sampling = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}
    config = GenerationConfig(max_new_tokens=max_new_tokens, pad_token_id=0, **sampling)
    never = torch.zeros(len(ids), dtype=torch.bool, device=pair.device)

    def tick(tokens: Tensor, scores: object, **kwargs) -> Tensor:
        synchronize(pair.device)
        clock.tick(rows, emitted=tokens.shape[1] - width)
        return never

    with ExitStack() as plain:
        for part in (pair.target, pair.draft):
            if isinstance(part, PreTrainedModel):
                plain.enter_context(plain_decoding.plain(part))
        torch.manual_seed(seed)
        options |= {"generation_config": config, "stopping_criteria": StoppingCriteriaList([tick])}
        out = pair.target.generate(padded, attention_mask=mask, **options)
    return list(out[:, width:].cpu())


def assisted(pair: ModelPair, ids: Sequence[Tensor], **options) -> list[Tensor]:
    """Return assisted generation's ids, row by row, since it takes no batches. options: of `transformers_generate`."""
    level = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()  # hides warnings about its own calls of the assistant
    try:
        options["assistant_model"] = pair.draft
        return [transformers_generate(pair, [row], rows=[i], **options)[0] for i, row in enumerate(ids)]
    finally:
        transformers_logging.set_verbosity(level)
