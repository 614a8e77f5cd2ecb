"""Check a drafter: exact output distribution, greedy and coupled identity, independent sessions."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from bass_core.drafters import Drafter
from bass_core.exactness.sampling import SamplingParams
from bass_core.generation import generate
from bass_core.loading.model_pair import ModelPair, load_pair
from bass_core.policies.protocol import BassHeuristic, DraftLengthPolicy, FixedLength
from bass_core.prompts import PromptLike, token_ids
from bass_core.session import Session
from bass_lab.checks import plain_decoding
from bass_lab.checks.enumeration import EXACT
from bass_lab.checks.exactness import FAULTS, Check, Report
from bass_lab.checks.oracle import Oracle, RepeatedKey
from bass_lab.checks.tabular import total_variation
from bass_lab.pairs import in_dtype
from bass_lab.texts.prompt_sets import prompt_set

Finding = tuple[bool, str, dict]
ENDING = [0, 1, 0, 1, 0]  # a repetition, so that lookup drafters find a match
BESIDE = 2  # tokens of the neighbouring row during enumeration
ADAPTIVE = BassHeuristic(initial=1)
# Sampling, repetition penalty, policy, new tokens. Drafts of two need four new tokens; top_k 2 then keeps the
# enumeration short.
WAYS = (
    (SamplingParams(1.0), 1.0, ADAPTIVE, 3),
    (SamplingParams(0.6, top_k=2), 1.0, ADAPTIVE, 4),
    (SamplingParams(1.3, top_k=2), 1.5, FixedLength(2), 4),
)
NEW, ROWS, PLACES = 16, 6, 2  # new tokens, rows, batch slots: rows wait, end and move


def check_drafter(
    drafter: Drafter,
    target: PreTrainedModel | None = None,
    *,
    small: ModelPair | None = None,
    progress: Callable[[str], None] = lambda message: None,
) -> Report:
    """Check the requirements of the engine on a drafter. Each failed check names the broken requirement.

    * law (token and block verification): enumerate every random decision of a row, for several sampling parameters and
    two policies. The target has three tokens, and a second row shares the batch at first. The distribution of the text
    must equal the target's to 10⁻¹². The drafter must therefore draw drafts with `Context.draw` from the distributions
    of its `Draft`.
    * greedy and coupled identity on `target` (None: the embedded target), with more rows than batch slots.
    * sessions apart: two concurrent sessions generate the same texts as two separate sessions.

    small: a pair for the enumeration, with a float64 target of three tokens, if `drafter` fits only one target (a
    feature head). Raises TypeError if `drafter` is no `Drafter`.
    """
    if not isinstance(drafter, Drafter):
        raise TypeError(f"drafter must be a Drafter, got {type(drafter).__name__}")
    small = ModelPair(_small_target(), _on_cpu(drafter)) if small is None else small
    where = next((model.device for model in drafter.models), None)  # without a model, any device will do
    real = load_pair(dtype="float32", device=where) if target is None else ModelPair(target)
    prompts = prompt_set("mini", ROWS) if target is None else _prompts(target)
    pair = ModelPair(real.target, drafter, real.tokenizer)
    if real.target.dtype in (torch.float16, torch.bfloat16):  # rounding would decide between close tokens
        pair = in_dtype(pair, torch.float32)
    demands: list[tuple[str, Callable[[], Finding]]] = [
        ("law, token verification", lambda: _law(small, "token")),
        ("law, block verification", lambda: _law(small, "block")),
        ("greedy identity", lambda: _greedy(pair, prompts)),
        ("coupled identity", lambda: _coupled(pair, prompts)),
        ("sessions apart", lambda: _apart(pair, prompts)),
    ]
    checks = []
    for name, check in demands:
        progress(name)
        started = time.perf_counter()
        try:
            passed, tested, details = check()
        except RepeatedKey as error:
            passed, tested, details = False, f"a random number was used twice: {error}", {}
        except AssertionError as error:
            passed, tested, details = False, f"random numbers not drawn with `Context.draw`: {error}", {}
        except FAULTS as error:
            passed, tested, details = False, f"{type(error).__name__}: {error}", {}
        checks.append(Check(name, passed, tested, round(time.perf_counter() - started, 3), details))
    return Report(f"{type(drafter).__name__} for {type(real.target).__name__}", checks)


def _prompts(target: PreTrainedModel) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    vocabulary = target.config.get_text_config().vocab_size
    return [torch.randint(vocabulary, (4 + 3 * row,), generator=generator) for row in range(ROWS)]


def _on_cpu(drafter: Drafter) -> Drafter:
    """Return the drafter, or a copy on the CPU: enumeration replaces random numbers on the host."""
    if all(model.device.type == "cpu" for model in drafter.models):
        return drafter
    copied = copy.deepcopy(drafter)
    for model in copied.models:
        model.cpu()
    return copied


def _small_target() -> PreTrainedModel:
    """Return a fixed random model with three tokens and four layers in float64."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        config = LlamaConfig(
            vocab_size=3, hidden_size=16, intermediate_size=32, num_hidden_layers=4, num_attention_heads=2,
            max_position_embeddings=32, initializer_range=0.5, pad_token_id=None,
        )  # fmt: skip
        return LlamaForCausalLM(config).double().eval()


def _law(pair: ModelPair, rule: str) -> Finding:
    """Enumerate a row in batch slot 1. The row moves to slot 0 when the greedy row there has ended."""
    prompt, beside, distances, drafted, accepted = torch.tensor(ENDING), torch.tensor(ENDING[1:]), {}, 0, 0
    options = {"verification": rule, "eos_token_id": (), "max_batch_size": PLACES, "trace": "off"}
    for params, penalty, policy, new in WAYS:
        own = vars(params) | {"repetition_penalty": penalty, "max_new_tokens": new}

        def run(own: dict[str, Any] = own, policy: DraftLengthPolicy = policy) -> tuple[int, ...]:
            nonlocal drafted, accepted
            with Session(pair, seed=1, draft_length=policy, **options) as session:
                first = session.submit(beside, max_new_tokens=BESIDE)  # greedy: no random decisions
                row = session.submit(prompt, **own)
                while not session.idle:
                    session.step()
                drafted, accepted = drafted + first.drafted + row.drafted, accepted + first.accepted + row.accepted
                return tuple(session.result(row).sequence.tolist())

        found = Oracle().laws(run)
        expected = plain_decoding.exact_law(pair.target, prompt, params, new, penalty)
        distances[f"{params}, {penalty}, {policy}"] = total_variation(found, expected)
    worst = max(distances.values())
    tested = f"total variation {worst:.1e}, allowed {EXACT:.0e}; {accepted} of {drafted} drafts accepted"
    return worst < EXACT, tested, {"distances": distances, "drafted": drafted, "accepted": accepted}


def _greedy(pair: ModelPair, prompts: PromptLike) -> Finding:
    ids = token_ids(pair, prompts)
    options = {"max_new_tokens": NEW, "draft_length": 4, "max_batch_size": PLACES, "eos_token_id": ()}
    out = generate(pair, ids, **options)
    alone = [plain_decoding.greedy(pair.target, each, NEW)[0] for each in ids]
    same = sum(map(torch.equal, out.sequences, alone))
    return same == ROWS, f"{same} of {ROWS} rows equal transformers' rows; {_accepted(out)}", {"identical": same}


def _coupled(pair: ModelPair, prompts: PromptLike) -> Finding:
    options = {"max_new_tokens": NEW, "temperature": 0.8, "verification": "coupled", "eos_token_id": ()}
    regular = generate(pair, prompts, draft_length=0, **options)
    out = generate(pair, prompts, draft_length=4, max_batch_size=PLACES, **options)
    same = sum(map(torch.equal, out.sequences, regular.sequences))
    return same == ROWS, f"{same} of {ROWS} rows equal draft length 0; {_accepted(out)}", {"identical": same}


def _accepted(out) -> str:
    steps = out.trace.steps
    return f"{int(steps.accepted.sum())} of {int(steps.drafted.sum())} drafts accepted"


def _apart(pair: ModelPair, prompts: PromptLike) -> Finding:
    options = {"draft_length": 4, "eos_token_id": (), "temperature": 0.8, "max_batch_size": PLACES}

    def submitted(seed: int) -> tuple[Session, list]:
        session = Session(pair, seed=seed, **options)
        return session, [session.submit(prompt, max_new_tokens=NEW) for prompt in prompts]

    def texts(*running: tuple[Session, list]) -> list[list[int]]:
        while not all(session.idle for session, _ in running):
            for session, _ in running:
                session.step()
        found = [session.result(row).sequence.tolist() for session, rows in running for row in rows]
        for session, _ in running:
            session.close()
        return found

    together, apart = texts(submitted(0), submitted(1)), texts(submitted(0)) + texts(submitted(1))
    same = sum(one == other for one, other in zip(together, apart, strict=True))
    return same == 2 * ROWS, f"{same} of {2 * ROWS} rows equal those of separate sessions", {"identical": same}
