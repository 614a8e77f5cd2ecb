"""Methods that decode the same prompts, timed: one after the other, or in turns, step by step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

from torch import Tensor

from bass_core.generation import Generation
from bass_core.loading.model_pair import ModelPair
from bass_core.loop.trace import Trace
from bass_core.session import Session
from bass_lab.kept_session import KeptSession
from bass_lab.measure.clocks import Clock, Elapsed

Timed = tuple[str, float, Clock, Trace | None]  # a method's name, seconds, clock; no trace of transformers' methods


class Method(NamedTuple):
    """A method as it is called. k: its draft length, None where it drafts nothing or a policy decides. options, pair:
    what `generate` takes, of this engine's methods; kept: what decodes with them, where steps are recorded."""

    k: int | None
    decode: Callable[[Clock, int], Generation | list[Tensor]]  # clock, seed -> texts
    options: dict[str, Any] | None = None
    pair: ModelPair | None = None
    drafter: str | None = None  # what drafts, where it is not the pair's own draft
    kept: KeptSession | None = None

    def run(self, ids: Sequence[Tensor], clock: Clock, seed: int) -> Generation | list[Tensor]:
        if self.kept is None:
            return self.decode(clock, seed)
        new = self.options["max_new_tokens"]
        return self.kept(ids, max_new_tokens=new, seed=seed, on_step=clock.stepped)


def keep(methods: dict[str, Method], rows: int) -> dict[str, KeptSession]:
    """A session for each method of ours whose steps are recorded, by its name."""
    kept = {}
    for name, method in methods.items():
        if method.options is not None:
            options = {"max_batch_size": rows, "eos_token_id": ()} | method.options
            del options["max_new_tokens"]
            session = KeptSession(method.pair, options.pop("max_batch_size"), **options)
            if session.session is not None:
                kept[name] = session
    return kept


def one_by_one(pair: ModelPair, ids: Sequence[Tensor], methods: dict[str, Method], *, seed: int) -> Iterator[Timed]:
    """Each method from its first token to its last."""
    for name, method in methods.items():
        clock = Clock()
        with Elapsed(pair.device) as elapsed:
            out = method.run(ids, clock, seed)
        yield name, elapsed.seconds, clock, out.trace if isinstance(out, Generation) else None


def in_turns(pair: ModelPair, ids: Sequence[Tensor], methods: dict[str, Method], *, seed: int) -> Iterator[Timed]:
    """All methods side by side: the next step is always that of the one that has emitted the fewest tokens.

    So all of them write the same part of a text in the same moments. Raises ValueError for methods of transformers'.
    """
    if peers := [name for name, method in methods.items() if method.options is None]:
        raise ValueError(f"only this engine's methods (regular, single, batched) can take turns, not {peers}")
    names = list(methods)
    names = names[seed % len(names) :] + names[: seed % len(names)]  # none is always the first
    with ExitStack() as stack:  # leaves sessions, and how they switched the models, in the reverse of their order
        decodes = {name: _Decode(methods[name], ids, seed, stack) for name in names}
        while going := [decode for decode in decodes.values() if not decode.session.idle]:
            min(going, key=lambda decode: decode.emitted).step()
        for name in methods:
            decode = decodes[name]
            yield name, decode.seconds, decode.clock, decode.session.trace


class _Decode:
    """What `generate` does, a step at a time, timed in its own steps alone."""

    def __init__(self, method: Method, ids: Sequence[Tensor], seed: int, stack: ExitStack):
        """stack: keeps the session open."""
        self.device, self.clock, self.seconds, self.emitted = method.pair.device, Clock(), 0.0, 0
        options = {"max_batch_size": len(ids), "seed": seed} | method.options
        new = options.pop("max_new_tokens")
        with self._turn():
            if method.kept is not None:
                self.session, self.handles = method.kept.session, method.kept.submit(ids, max_new_tokens=new, seed=seed)
            else:
                self.session = stack.enter_context(Session(method.pair, eos_token_id=(), **options))
                self.handles = [self.session.submit(row, max_new_tokens=new) for row in ids]
                self.session.reserve(max(handle.limit for handle in self.handles))
            stack.enter_context(self.session.prepared())

    def step(self) -> None:
        """One step; the last one fetches the results, too."""
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
