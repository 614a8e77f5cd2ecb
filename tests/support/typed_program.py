"""A user's program for `mypy --strict`. Each reveal_type shows the type of a public name. Never run."""

import asyncio
from typing import reveal_type

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

import bass_core as bass
import bass_lab as lab


class Careful(bass.DraftLengthPolicy):
    k = 4

    def plan(self, rows: bass.RowsView) -> int:
        reveal_type(rows)
        return min(self.k, int(rows.remaining.max()) - 1)

    def update(self, drafted: Tensor, accepted: Tensor) -> None:
        self.k = self.k + 1 if bool((accepted == drafted).all()) else 1


class Nothing(bass.Drafter):
    def draft(self, context: bass.Context, lengths: NDArray[np.int64], policy: bass.DraftLengthPolicy) -> bass.Draft:
        reveal_type(context.last_tokens())
        return bass.Draft.none(context)


async def pieces(pair: bass.ModelPair) -> list[str]:
    return [piece async for _, piece in bass.astream(pair, "def f():\n", max_new_tokens=4)]


async def shared(pair: bass.ModelPair) -> str | None:
    async with bass.AsyncSession(pair, max_batch_size=4) as session:
        reveal_type((session, session.stream("a"), await session.generate("a", max_new_tokens=4)))
        return (await session.generate("a")).text


def tell(event: bass.StepEvent) -> None:
    reveal_type(event.new_tokens)


pair = bass.load_pair("target", draft="draft", dtype="bfloat16")
again = bass.ModelPair(target=pair.target, draft=bass.NgramDrafter(), tokenizer=pair.tokenizer)
reveal_type((pair, again, pair.target, pair.draft, pair.tokenizer, pair.device))

out = bass.generate(pair, ["a", "b"], draft_length=Careful(), on_step=tell, generation_config=None, stop="\n")
reveal_type(
    (out, out[0].text.split(), out.texts[0].split(), out.sequences, out.logprobs, out.finish_reasons, out.by_prompt)
)
reveal_type([(row.sequence, row.finish_reason) for row in out])
reveal_type((out.to_pandas(), out.trace.steps, bass.Trace.load("trace.json").tokens))
reveal_type((out.trace.summary(), out.trace.summary()["tokens_per_step"]))
reveal_type((bass.stream(pair, "a"), bass.astream(pair, "a"), asyncio.run(pieces(pair))))
reveal_type((bass.SamplingParams(temperature=0.5), bass.SamplingParams().greedy))

costs = bass.CostModel.load("costs.json")
policies = [bass.Goodput(costs), bass.BassHeuristic(), bass.FixedLength(3), lab.HuggingFaceHeuristic()]
reveal_type((costs, bass.costs_for(pair), policies))
with bass.Session(pair, max_batch_size=4, draft_length=policies[0]) as session:
    handle = session.submit([{"role": "user", "content": "a"}], max_new_tokens=8, deadline=2.0)
    reveal_type((session, handle, session.step(), session.result(handle), session.idle, session.trace))

trace = lab.record(pair, ["a"], max_new_tokens=4, temperature=0.2)
replays = lab.simulate(trace, Careful(), costs, batch=4)
reveal_type((trace, trace.alpha, replays, replays.seconds_per_token.mean()))
with lab.profile() as profile:
    reveal_type(profile)
report = lab.verify(pair, samples=1000)
reveal_type((report.passed, report.checks, report.table(), lab.load_records("runs"), lab.named_pair("opt-13b")))
