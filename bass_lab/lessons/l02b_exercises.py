"""Exercises of lesson 02b: each part of a step in the lesson's loop, and a loop for a batch, against the engine's text.

The parts here have switches for the usual bugs. A wrong text that equals the text of a bug is named.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import product

import torch
from torch import Tensor

from bass_core.exactness import randomness
from bass_core.generation import generate
from bass_core.loading.model_pair import ModelPair
from bass_lab.lessons.checking import Case, check, with_hint


def _draft_tokens(draft, last: Tensor, k: int, keys: randomness.StepKeys, bug: str = "") -> tuple[Tensor, Tensor]:
    tokens, q = [last], []
    for slot in range(k):
        q.append(draft.read(tokens[-1][:, None])[:, -1])
        tokens.append(randomness.draw(q[-1], keys.draft(0 if bug == "key" else slot)))
    if bug != "hole":
        draft.read(tokens[-1][:, None])
    return torch.stack(tokens[1:], 1), torch.stack(q, 1)


def _target_pass(target, last: Tensor, drafted: Tensor, bug: str = "") -> Tensor:
    fed = drafted if bug == "last" else torch.cat([last[:, None], drafted], 1)
    return target.read(fed[:, :-1] if bug == "short" else fed)


def _judge(drafted: Tensor, q: Tensor, p: Tensor, u: Tensor, bug: str = "") -> tuple[int, Tensor]:
    judging, others = p[bug in ("late", "all late") :], p[bug == "all late" :]
    passed = [bool(u[i] < judging[i, x] / q[i, x]) for i, x in enumerate(drafted)]
    accepted = sum(passed) if bug == "goes on" else [*passed, False].index(False)
    if accepted == len(drafted):
        return accepted, p[-2 if bug == "bonus" else -1]
    weights = others[accepted] if bug == "redraw" else (others[accepted] - q[accepted]).clamp(min=0)
    return accepted + (bug == "rejected"), weights


def _commit(text: Tensor, drafted: Tensor, accepted: int, own: Tensor, models: Sequence, bug: str = "") -> Tensor:
    for model in {"caches": (), "target": models[1:], "draft": models[:1]}.get(bug, models):
        slots = torch.arange(model.own.shape[1])
        model.own = model.own & (slots < len(slots) - len(drafted) + accepted)
    return torch.cat([text, drafted[: accepted + (bug in ("rejected", "instead"))], own[bug in ("own", "instead") :]])


PARTS = {"draft_tokens": _draft_tokens, "target_pass": _target_pass, "judge": _judge, "commit": _commit}
BUGS = {
    "draft_tokens": {
        "hole": "the draft model has not read its last draft token: its cache has a hole after full acceptance",
        "key": "each slot has its own random number, keys.draft(slot)",
    },
    "target_pass": {
        "last": "the pass must also read the last committed token, which comes before the first draft token",
        "short": "the pass must also read the last draft token, which comes before the bonus token",
    },
    "judge": {
        "late": "draft token i is compared with the target's distribution one position too late: use p[i]",
        "all late": "p is read one position too late: p[i] and q[i] belong to draft token i",
        "goes on": "the first rejection ends the step, later draft tokens do not count",
        "rejected": "the rejected token counts as accepted",
        "redraw": "redraw from p: the recovered token comes from the residual",
        "bonus": "the bonus token is one position too early: it comes after the last draft token, from p[k]",
    },
    "commit": {
        "rejected": "the rejected token is kept",
        "instead": "the rejected token is kept in place of the target's own token",
        "own": "the target's own token, recovered or bonus, is missing",
        "caches": "the KV caches are not rolled back",
        "target": "the target's KV cache is not rolled back",
        "draft": "the draft model's KV cache is not rolled back",
    },
}


def check_parts(loop: Callable, prompts: Sequence[Tensor], engine: Mapping[float, Sequence[Tensor]], **parts) -> bool:
    """Check parts of a step in loop(prompt, temperature, draft_tokens, target_pass, judge, commit) -> generated ids.

    engine: the engine's texts by temperature. Parts that are not given are correct ones from this module.
    """

    def same(temperature: float, result: Sequence[Tensor], name: str, bug: str) -> bool:
        given = PARTS | {name: partial(PARTS[name], bug=bug)}
        texts = zip(prompts, result, strict=True)
        return all(torch.equal(loop(prompt, temperature, **given), text) for prompt, text in texts)

    def fault(temperature: float, result: Sequence[Tensor]) -> str:
        bugs = {said: (name, bug) for name in parts for bug, said in BUGS[name].items()}
        told = _difference(engine[temperature], result)
        return told and with_hint(told, bugs, lambda bug: same(temperature, result, *bug))

    def decode(temperature: float) -> list[Tensor]:
        return [loop(prompt, temperature, **(PARTS | parts)) for prompt in prompts]

    return check(decode, ((f"temperature {t}", (t,), partial(fault, t)) for t in engine))


def check_loop(
    decode: Callable, pair: ModelPair, prompts: Sequence[Tensor], temperature: float, max_new_tokens: int, **options
) -> bool:
    """Check decode(prompts, temperature, ends) -> generated ids of each row. A row ends with a token of `ends`.

    options: draft_length and seed, as of the engine.
    """
    passes: list[None] = []

    def fault(wanted: Sequence[Tensor], steps: int, hint: str, result: object) -> str:
        told = _difference(wanted, result, hint)
        if told or steps in (0, len(passes)):
            return told
        return f"the text is right after {len(passes)} target passes, not {steps}: do rows wait for the slowest row?"

    def cases() -> Iterator[Case]:
        mixed = "one row is right: does each row keep its own accepted length, in its text and in the caches?"
        numbers = "greedy text is right: does each step have its own keys, and each row its own u?"
        ends: tuple[int, ...] = ()
        for t, name in product((0.0, temperature), ("one row", "all rows", "with an end token")):
            hint = numbers if t else mixed if name != "one row" else ""
            rows, given = prompts[:1] if name == "one row" else prompts, ends if "end" in name else ()
            # The engine shortens a row's last drafts. Sampled text depends on draft lengths, so it gets a later limit.
            limit = max_new_tokens + (options["draft_length"] + 1 if t else 0)
            out = generate(pair, rows, temperature=t, max_new_tokens=limit, eos_token_id=given, **options)
            wanted = [row[:max_new_tokens] for row in out.sequences]
            ends = ends or (int(wanted[0][max_new_tokens // 2]),)
            passes.clear()
            steps = 0 if t else out.trace.steps.step.nunique()
            yield f"{name}, temperature {t}", (rows, t, given), partial(fault, wanted, steps, hint)

    hook = pair.target.register_forward_pre_hook(lambda *_: passes.append(None))
    try:
        return check(decode, cases())
    finally:
        hook.remove()


def _difference(wanted: Sequence[Tensor], found: object, hint: str = "") -> str:
    if not isinstance(found, Sequence) or len(found) != len(wanted):
        return f"expected the ids of {len(wanted)} rows, got {found!r}"
    for row, texts in enumerate(zip(wanted, found, strict=True)):
        right, ids = ([int(token) for token in text] for text in texts)
        at = next((at for at, (a, b) in enumerate(zip(right, ids, strict=False)) if a != b), None)
        if at is not None:
            told = f"row {row} is right for {at} tokens, then has {ids[at]} in place of {right[at]}"
            return f"{told}; {hint}" if hint else told
        if len(ids) > len(right):
            return f"row {row} goes on after its end, which is an end token or the limit of new tokens"
        if len(ids) < len(right):
            return f"row {row} has only {len(ids)} of {len(right)} tokens; an end token ends its own row, and is kept"
    return ""
