"""Does a drafter keep its word? Its law is enumerated, greedy and coupled text compared, its sessions kept apart."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable

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
ENDING = [0, 1, 0, 1, 0]  # repeats itself, so that lookups find something
BESIDE = 2  # tokens of the row beside the one whose law is enumerated
ADAPTIVE = BassHeuristic(initial=1)
# With the tokens to write: four, for drafts of two; then of two choices each, or enumerating them would take minutes.
WAYS = (
    (SamplingParams(1.0), ADAPTIVE, 3),
    (SamplingParams(0.6, top_k=2), ADAPTIVE, 4),
    (SamplingParams(1.3, top_k=2, repetition_penalty=1.5), FixedLength(2), 4),
)
NEW, ROWS, PLACES = 16, 6, 2  # tokens, rows and places for them: rows wait, end and move


def check_drafter(
    drafter: Drafter,
    target: PreTrainedModel | None = None,
    *,
    small: ModelPair | None = None,
    progress: Callable[[str], None] = lambda message: None,
) -> Report:
    """Check what the engine relies on in a drafter; a check that fails says which demand is broken.

    * law (token and block verification): every random decision of a row with a tiny target of three tokens is
    enumerated, for some ways to sample and two policies, at first beside another row. The law of its text must be the
    target's to 10⁻¹², so drafts must be drawn from the distributions that come with them, by `Context.draw` alone.
    * greedy and coupled identity on `target` (None: the embedded one), with more rows than places.
    * sessions apart: two at once write what each writes alone.

    small: a target of three tokens in float64 with such a drafter, to enumerate where `drafter` fits one target alone
    (a feature head). Raises TypeError for what is no `Drafter`.
    """
    if not isinstance(drafter, Drafter):
        raise TypeError(f"drafter must be a Drafter, got {type(drafter).__name__}")
    small = ModelPair(_small_target(), _on_cpu(drafter)) if small is None else small
    where = next((model.device for model in drafter.models), None)  # one without a model may be anywhere
    real = load_pair(dtype="float32", device=where) if target is None else ModelPair(target)
    prompts = prompt_set("mini", ROWS) if target is None else _prompts(target)
    pair = ModelPair(real.target, drafter, real.tokenizer)
    if real.target.dtype in (torch.float16, torch.bfloat16):  # where rounding decides between close tokens
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
            passed, tested, details = False, f"random numbers that are not `Context.draw`'s: {error}", {}
        except FAULTS as error:
            passed, tested, details = False, f"{type(error).__name__}: {error}", {}
        checks.append(Check(name, passed, tested, round(time.perf_counter() - started, 3), details))
    return Report(f"{type(drafter).__name__} for {type(real.target).__name__}", checks)


def _prompts(target: PreTrainedModel) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    vocabulary = target.config.get_text_config().vocab_size
    return [torch.randint(vocabulary, (4 + 3 * row,), generator=generator) for row in range(ROWS)]


def _on_cpu(drafter: Drafter) -> Drafter:
    """The drafter, or a copy where its models are on a GPU: enumeration asks for random numbers on the host."""
    if all(model.device.type == "cpu" for model in drafter.models):
        return drafter
    copied = copy.deepcopy(drafter)
    for model in copied.models:
        model.cpu()
    return copied


def _small_target() -> PreTrainedModel:
    """Of three tokens, four layers, float64; always the same."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        config = LlamaConfig(
            vocab_size=3, hidden_size=16, intermediate_size=32, num_hidden_layers=4, num_attention_heads=2,
            max_position_embeddings=32, initializer_range=0.5, pad_token_id=None,
        )  # fmt: skip
        return LlamaForCausalLM(config).double().eval()


def _law(pair: ModelPair, rule: str) -> Finding:
    """The row begins in the second place, and moves when the greedy one in the first has ended."""
    prompt, beside, distances, drafted, accepted = torch.tensor(ENDING), torch.tensor(ENDING[1:]), {}, 0, 0
    options = {"verification": rule, "eos_token_id": (), "max_batch_size": PLACES, "trace": "off"}
    for way, policy, new in WAYS:

        def run(way: SamplingParams = way, policy: DraftLengthPolicy = policy, new: int = new) -> tuple[int, ...]:
            nonlocal drafted, accepted
            with Session(pair, seed=1, draft_length=policy, **options) as session:
                first = session.submit(beside, max_new_tokens=BESIDE)  # greedy: it decides nothing by chance
                row = session.submit(prompt, max_new_tokens=new, **vars(way))
                while not session.idle:
                    session.step()
                drafted, accepted = drafted + first.drafted + row.drafted, accepted + first.accepted + row.accepted
                return tuple(session.result(row).sequence.tolist())

        # Else each of the many sessions switches the models.
        with Session(pair, **options) as around, around.prepared():
            found = Oracle().laws(run)
        expected = plain_decoding.exact_law(pair.target, prompt, way, new)
        distances[f"{way}, {policy}"] = total_variation(found, expected)
    worst = max(distances.values())
    tested = f"total variation {worst:.1e}, allowed {EXACT:.0e}; {accepted} of {drafted} drafts accepted"
    return worst < EXACT, tested, {"distances": distances, "drafted": drafted, "accepted": accepted}


def _greedy(pair: ModelPair, prompts: PromptLike) -> Finding:
    ids = token_ids(pair, prompts)
    options = {"max_new_tokens": NEW, "draft_length": 4, "max_batch_size": PLACES, "eos_token_id": ()}
    out = generate(pair, ids, **options)
    alone = [plain_decoding.greedy(pair.target, each, NEW)[0] for each in ids]
    same = sum(map(torch.equal, out.sequences, alone))
    return same == ROWS, f"{same} of {ROWS} rows are transformers' own; {_accepted(out)}", {"identical": same}


def _coupled(pair: ModelPair, prompts: PromptLike) -> Finding:
    options = {"max_new_tokens": NEW, "temperature": 0.8, "verification": "coupled", "eos_token_id": ()}
    regular = generate(pair, prompts, draft_length=0, **options)
    out = generate(pair, prompts, draft_length=4, max_batch_size=PLACES, **options)
    same = sum(map(torch.equal, out.sequences, regular.sequences))
    return same == ROWS, f"{same} of {ROWS} rows are those of draft length 0; {_accepted(out)}", {"identical": same}


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
    return same == 2 * ROWS, f"{same} of {2 * ROWS} rows of two sessions at once are those of one", {"identical": same}
