"""Exercises: checks refuse the solutions with one changed piece of text, and name the mistake."""

import json
import math
import re
from importlib import import_module

import lesson_runs
import numpy as np
import pytest
import torch
from tiny import tiny_model
from transformers import DynamicCache

pytest.importorskip("triton")

import bass_core as bass
from bass_core.exactness import randomness, verification
from bass_core.model.transformers_internals import CACHE
from bass_kernels import accounting
from bass_lab.lessons import checking, l01_exercises, l02b_exercises, l05_demonstrations, l05_exercises, l07_exercises

NAMES = {"torch": torch, "math": math, "bass": bass, "accounting": accounting, "demonstrations": l05_demonstrations}
SOURCES = [
    "".join(cell["source"])
    for path in sorted(lesson_runs.NOTEBOOKS.glob("*.ipynb"))
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]
    if cell["cell_type"] == "code"
]
LESSONS = [import_module(f"bass_lab.lessons.l{number:02}_exercises") for number in (*range(1, 12), 13)]
CHECKS = {
    name: check
    for module in LESSONS
    for name, check in vars(module).items()
    if name.startswith("check_") and name not in ("check_softcap", "check_drafter", "check_bigram")
}
MISTAKES = [  # exercise, text of the solution, wrong text, words of the message
    ("accept_or_recover", "(p - q).clamp(min=0)", "p", "the text gets the distribution [0.65, 0.19, 0.16]"),
    ("accept_or_recover", "left / left.sum() if left.sum() > 0 else p", "p", "(redraw from p: the recovered token"),
    ("accept_or_recover", "min(1.0, float(p[drafted] / q[drafted]))", "p[drafted] / q[drafted]", "the chance is 3"),
    ("by_block", "        if u[i - 1] < h:", "        if accepted == i - 1 and u[i - 1] < h:", "a later one may still"),
    ("by_block", "(weight * p", "(p", "multiply p by the weight"),
    ("expected_tokens", "sum(alpha**i for i in range(k + 1))", "1 + alpha * k", "only if all before it"),
    ("expected_tokens", "range(k + 1)", "range(1, k + 1)", "the target's own token is missing"),
    ("positions", "- 1 +", "+", "row 0, query 0 (the last committed token) has position 4, got 5"),
    ("positions", "lengths[:, None]", "lengths.max()", "two rows of different lengths"),
    ("positions", "torch.minimum(queries, drafted[:, None])", "queries", "padding, which repeats the row's last valid"),
    ("keep", "<=", "<", "entry 2 (draft token 2) was accepted, but you drop it"),
    ("keep", "<= accepted[:, None]", ">= 0 * accepted[:, None]", "was rejected, but you keep it"),
    ("alpha", "sum(accepted) / judged", "sum(accepted) / sum(drafted)", "this is the acceptance rate"),
    ("alpha", ", sum(accepted) / sum(drafted)", ", sum(accepted) / judged", "(this is alpha)"),
    ("algorithm_1", "math.ceil", "math.floor", "round length / 10 up"),
    ("algorithm_1", " - s)", ")", "s makes the draft one token shorter"),
    ("algorithm_1", " - s), 1", " - s), s + 1", "s is 1 after a miss, not s + 1"),
    ("algorithm_1", "min(length + 2, 32)", "length + 2", "the limit is 32"),
    ("best_length", "speeds.index(max(speeds))", "1 + speeds[1:].index(max(speeds[1:]))",
     "draft tokens are never accepted"),
    ("gaps", "max(reached, end)", "end", "a short one: [(0, 9), (2, 3), (10, 12)]): expected 1, got 7"),
    ("owner", "launches.get(correlation)) for correlation, _", "at) for _, at",
     "the kernel runs during the next phase"),
    ("owner", "in kernels]", "in dict(kernels).items()]", "(a CUDA graph: three"),
    ("merge", "torch.where(lse == -torch.inf, 0.0, lse)", "lse", "(nothing in either): out should be [0.0"),
    ("merge", "lse = torch.logaddexp(lse_a, lse_b)", "lse = (lse_a.exp() + lse_b.exp()).log()", "(scores near 1000)"),
    ("keys_needed", "window + 1", "window", "expected (28, 72), got (24, 72)"),
    ("keys_needed", "min(last + 1, kv_length)", "last + 1", "expected ("),
    ("cut", "at + chunk, n", "at + chunk, n - 1", "of 1000"),
    ("cut", "range(16, max(lengths) + 16, 16)", "(10**6,)", "is done after 1032; "),
    ("latencies", "(n - 1)", "n", "the prefill's token"),
    ("latencies", "1e3 * ", "", "these are seconds"),
    ("latencies", "return min(each), sum(each) / len(each), max(each)",
     "end = [x for _, x in sorted(zip(finished, each))]\n    return end[0], sum(each) / len(each), end[-1]",
     "first is the smallest latency, not the latency of the row that finishes first"),
    ("floor", "max(memory, arithmetic)", "memory + arithmetic", "reads and operations overlap"),
    ("floor", "(2 * weights + per_key", "(2 * weights * batch + per_key", "expected"),
    ("pass_at_k", "if seconds <= budget", "if seconds < budget", "expected 1.0000, got 0.0"),
    ("pass_at_k", "if seconds <= budget", "if True", "late rows are not done"),
    ("pass_at_k", "len(passed)", "len(right)", "late rows are drawn as well"),
    ("pass_at_k", "math.comb(n - c, k) / math.comb(n, k)", "(1 - c / n) ** k", "draw without replacement"),
    ("unpack", "code - 16 if code > 7 else code", "code", "the codes have no sign"),
    ("unpack", "[each & 15 for each in packed] + [each >> 4 for each in packed]",
     "[half for each in packed for half in (each & 15, each >> 4)]", "16 inputs apart, not neighbours"),
    ("step_bytes", "4 + 16 / 32", "4", "weights of 4 bits have scales"),
    ("step_bytes", "draft_length * draft ", "min(draft_length, 1) * draft ", "every draft pass reads"),
    ("step_bytes", ") / 8", ")", "these are bits"),
    ("lossy_law", "refused * a for", "0 for", "draws that replace rejected tokens are missing"),
    ("lossy_law", "a >= epsilon * max(p)", "b >= epsilon * max(q)", "compare p with the limit, not q"),
    ("lossy_law", ">= epsilon", "> epsilon", "exactly at the limit is accepted"),
    ("goodput", "for arrived, _, first, ended, tokens", "for _, arrived, first, ended, tokens",
     "the wait starts at the arrival"),
    ("goodput", "(tokens - 1)", "tokens", "n tokens have n - 1 gaps"),
    ("goodput", " - requests[0][0])", ")", "first arrival"),
    ("source_mask", "< torch", ">= torch", "may *not* attend"),
    ("source_mask", "torch.tensor(lengths)[:, None]", "1 + torch.arange(len(lengths))[:, None]", "causal"),
    ("state_after", "start + accepted + 1", "len(inputs)", "rejected ones too"),
    ("state_after", "start + accepted + 1", "start", "before the step"),
    ("cache_bytes", " * 2", "", "not both"),
    ("cache_bytes", "len(sources) * (max(sources) + max(texts))", "(sum(sources) + sum(texts))", "as the longest"),
]  # fmt: skip


MISTAKES_IN_THE_LOOP = [  # part, text of the solutions, wrong text, words of the message
    ("draft_tokens", "draft.read(tokens[-1][:, None])  #", "# ", "a hole after full acceptance"),
    ("draft_tokens", "keys.draft(slot)", "keys.draft(0)", "each slot has its own random number"),
    ("target_pass", "torch.cat([last[:, None], drafted], 1)", "drafted", "must also read the last committed token"),
    ("target_pass", "drafted], 1)", "drafted], 1)[:, :-1]", "must also read the last draft token"),
    ("judge", "u[i] >= p[i,", "u[i] >= p[i + 1,", "draft token i is compared"),
    ("judge", "for i, x in", "p = torch.cat([p[1:], p[-1:]])\n    for i, x in", "p is read one position too late"),
    ("judge", "u):\n", "u):\n    n = sum(u[i] < p[i, x] / q[i, x] for i, x in enumerate(drafted))\n"
     "    if n < len(drafted): return n, (p[n] - q[n]).clamp(min=0)\n", "the first rejection ends the step"),
    ("judge", "return i, (p", "return i + 1, (p", "the rejected token counts as accepted"),
    ("judge", "(p[i] - q[i]).clamp(min=0)", "p[i]", "redraw from p"),
    ("judge", "p[-1]", "p[-2]", "the bonus token is one position too early"),
    ("commit", "[:accepted], own", "[: accepted + 1], own", "(the rejected token is kept)"),
    ("commit", "[:accepted], own", "[: accepted + 1]", "kept in place of the target's own token"),
    ("commit", "[:accepted], own", "[:accepted]", "recovered or bonus, is missing"),
    ("commit", "forget(models, ", "(models, ", "the KV caches are not rolled back"),
    ("commit", "forget(models, ", "forget(models[:1], ", "the draft model's KV cache is not rolled back"),
    ("commit", "forget(models, ", "forget(models[1:], ", "the target's KV cache is not rolled back"),
    ("decode", "tensor(accepted)", "tensor([min(accepted)])", "does each row keep its own accepted length"),
    ("decode", "own = randomness.draw(torch.stack(weights)",
     "accepted = [min(accepted)] * len(p)\n    own = randomness.draw(p[:, accepted[0]]", "wait for the slowest row?"),
    ("decode", "if end in new", "if False", "row 0 goes on after its end"),
    ("decode", "new.index(end) + 1", "new.index(end)", "an end token ends its own row, and is kept"),
    ("decode", "while not all", "while not any", "row 1 has only"),
    ("decode", "step += 1", "step = 1", "does each step have its own keys"),
    ("decode", "_solution, drafted, q, p, u)", "_solution, drafted, q, p, u[:1].expand_as(u))", "each row its own u"),
]  # fmt: skip


def solution(name, right="", wrong=""):
    (called,) = re.findall(rf"check_{name}\((\w+olution)\)", "\n".join(SOURCES))
    (source,) = [each for each in SOURCES if re.search(rf"^(def|class) {called}\b", each, re.MULTILINE)]
    source = source.partition("\nassert ")[0]
    assert right in source
    names = dict(NAMES)
    exec(source.replace(right, wrong) if right else source, names)
    return names[called]


def refused(check, attempt, words, capsys):
    assert not check(attempt)
    out = capsys.readouterr().out
    assert out.startswith("Not right. Case ") and words in out, out


@pytest.mark.parametrize(("name", "right", "wrong", "words"), MISTAKES)
def test_mistake_is_named(name, right, wrong, words, capsys):
    refused(CHECKS[f"check_{name}"], solution(name, right, wrong), words, capsys)


def test_every_exercise_has_a_mistake_and_refuses_an_empty_answer(capsys):
    assert {f"check_{name}" for name, *_ in MISTAKES} == set(CHECKS)
    for name in sorted(set(CHECKS) - {"check_source_mask"}):
        refused(CHECKS[name], lambda *given: None, "None", capsys)


def test_check_passes_stubs_and_errors_on(capsys):
    def judge(result):
        return "" if result == 2 else "expected 2"

    assert checking.check(lambda x: x + 1, iter([("one", (1,), judge)])) and "1 cases agree" in capsys.readouterr().out

    def stub(x):
        raise NotImplementedError

    assert not checking.check(stub, iter([("one", (1,), judge)]))
    assert capsys.readouterr().out == "Not solved yet.\n"
    with pytest.raises(ZeroDivisionError):
        checking.check(lambda x: x // 0, iter([("one", (1,), judge)]))
    assert capsys.readouterr().out.startswith("Case 1 (one) raises")


@pytest.fixture(scope="module")
def loop():
    """Return the names of lesson 02b with tiny models and short texts, and the source of its solutions."""
    prompts = [torch.randint(3, 97, (n,), generator=torch.Generator().manual_seed(n)) for n in (5, 9, 3)]
    names = {
        "pair": bass.ModelPair(tiny_model(), tiny_model(noise=0.1)),
        "ids": prompts,
        "CACHE": CACHE,
        "DynamicCache": DynamicCache,
    }
    cells = json.loads((lesson_runs.NOTEBOOKS / "02b_write_the_loop.ipynb").read_text(encoding="utf-8"))["cells"]
    solutions = [cell for cell in cells if cell["metadata"].get("tags") == ["solution"]]
    for cell in cells:
        if cell["cell_type"] == "code" and cell["id"] != "models" and cell not in solutions:
            exec("".join(cell["source"]).replace("int = 24", "int = 12").replace("0.8", "1.0"), names)
    return names, re.sub(r"(?m)^assert .*$", "", "\n".join("".join(cell["source"]) for cell in solutions))


@pytest.mark.parametrize(("name", "right", "wrong", "words"), MISTAKES_IN_THE_LOOP)
def test_mistake_in_the_loop_is_named(name, right, wrong, words, loop, capsys):
    names, solutions = loop
    assert right in solutions
    exec(solutions.replace(right, wrong), names := dict(names))
    models = names["pair"], names["ids"], names["temperature"]
    check = {"decode": lambda decode: l02b_exercises.check_loop(decode, *models, **names["fixed"])}
    refused(check.get(name, lambda part: names["check"](**{name: part})), names[f"{name}_solution"], words, capsys)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("right", "wrong", "words"),
    [
        ("lengths, laws", "lengths.clip(max=1), laws", "3 tokens were requested, but 1 drafted"),
        ("context.draw(q, slot)", "context.draw(q, 0)", "a random number was used twice"),
        ("q = context.law(self.logits[token])", "q = self.logits[token].softmax(-1)", "at that temperature"),
        ("(token, q)", "(token, (q + q.mean(-1, keepdim=True)) / 2)", "the drafter reports probability"),
    ],
)
def test_mistake_in_a_drafter_is_named(right, wrong, words, capsys):
    refused(l05_exercises.check_bigram, solution("bigram", right, wrong), words, capsys)


class Launched:
    """A fake Triton kernel: `kernel[grid](scores, out, cap, N=N)`."""

    def __init__(self, function):
        self.function = function

    def __getitem__(self, grid):
        return lambda scores, out, cap, N: out.copy_(self.function(scores, cap))


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (lambda s, cap: s, "the scores come back unchanged"),
        (lambda s, cap: (s / cap).tanh(), "multiply it by the cap"),
        (lambda s, cap: cap * s.tanh(), "divide the scores by the cap"),
        (lambda s, cap: cap * ((2 * s / cap).exp() - 1) / ((2 * s / cap).exp() + 1), "e^x overflowed"),
    ],
)
def test_softcap_mistake_is_named(wrong, words, capsys):
    refused(l07_exercises.check_softcap, Launched(wrong), words, capsys)


def test_relative_error_is_infinite_for_nan_and_other_shapes():
    wanted = torch.tensor([3.0, 4.0])
    assert checking.relative_error(torch.tensor([3.0, 4.5]), wanted) == pytest.approx(0.1)
    assert checking.relative_error(torch.tensor([3.0, torch.nan]), wanted) == float("inf")
    assert checking.relative_error(torch.tensor([[3.0, 4.0]]), wanted) == float("inf")


def test_block_exercise_accepts_the_engines_rule(monkeypatch, capsys):
    def engine(drafted, q, p, u):
        source = []
        monkeypatch.setattr(randomness, "accept", lambda h, key: u[None] < h)
        monkeypatch.setattr(randomness, "draw", lambda probs, key: source.append(probs[0]) or torch.zeros(1).long())
        keys = randomness.StepKeys(torch.zeros(1).long(), torch.zeros(1).long(), len(drafted))
        outcome = verification.block(drafted[None], torch.tensor([len(drafted)]), q[None], p[None], keys)
        return int(outcome.accepted), source[0]

    assert l01_exercises.check_by_block(engine), capsys.readouterr().out


def test_algorithm_1_exercise_asks_for_the_engines_rule():
    update, policy = solution("algorithm_1"), bass.BassHeuristic()
    generator = np.random.default_rng(0)
    length, s = policy.length, policy.shrinking
    for _ in range(100):
        accepted = generator.binomial(length, 0.9, size=2)
        policy.update(*map(torch.as_tensor, ([length] * 2, accepted)))
        length, s = update(length, s, accepted.tolist())
        assert (length, s) == (policy.length, policy.shrinking)


def test_rates_exercise_asks_for_the_rates_of_a_trace(pair):
    trace = bass.generate(pair, ["def f(x):\n", "class A:\n"], max_new_tokens=16, temperature=0.8).trace
    summary, decode = trace.summary(), trace.steps.query("kind == 'decode'")
    found = solution("alpha")(decode.accepted.tolist(), decode.drafted.tolist())
    assert found == pytest.approx((summary["alpha"], summary["acceptance_rate"]))
