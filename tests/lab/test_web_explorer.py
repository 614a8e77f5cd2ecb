"""The explorer in docs/explorer equals the Python engine: rule, tokens, accepted lengths, clocks and tokenizer."""

import ast
import functools
import json
import re
import threading
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import lesson_runs
import pytest
import torch
from documents import ROOT

import bass_core as bass
from bass_core.exactness import randomness, verification
from bass_core.policies.costs import CostModel
from bass_lab.measure.modelled_costs import predict
from bass_lab.show import browser
from bass_lab.texts.prompt_sets import prompt_set

RULE = (ROOT / "docs/explorer/rule.js").read_text("utf-8")
EPYC = "bass_core/assets/costs/amd-epyc-2-threads-dfc6af2c9333.json"
SHORT = [prompt.splitlines()[0] + "\n" for prompt in prompt_set("mini", 64)]
PAIR = functools.cache(bass.load_pair)
CALL = "([name, given]) => import('/tests/lab/web_explorer.js').then((all) => all[name](given))"


@pytest.fixture(scope="module")
def opened():
    """Serve the repository, and yield a function from a path to a page."""
    lesson_runs.chromium()
    quiet = type("Quiet", (SimpleHTTPRequestHandler,), {"log_message": lambda *_: None})
    server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(quiet, directory=ROOT))
    with server, browser.launched() as chromium:
        threading.Thread(target=server.serve_forever, daemon=True).start()

        def page(path, width=1920):
            made = chromium.new_page(viewport={"width": width, "height": 1080})
            made.set_default_timeout(browser.PATIENCE * 1000)
            made.fetched = []
            made.on("request", lambda request: made.fetched.append(request.url))
            made.goto(f"http://127.0.0.1:{server.server_port}/docs/explorer/{path}")
            return made

        yield page
        server.shutdown()


@pytest.fixture(scope="module")
def call(opened):
    page = opened("rule.js")
    return lambda name, given=None: page.evaluate(CALL, [name, given])


def decisions():
    """Return 400 decisions, some with probabilities of 0, and their outcomes in the Python engine."""
    torch.manual_seed(0)
    for i in range(400):
        k, row, step, lengths = i % 6, i % 8, torch.tensor([i % 31]), torch.tensor([i % 6])
        logits = torch.randn(2 * k + 1, 8) * (0.3 + i // 6 % 4)
        q, p = logits.masked_fill(torch.rand_like(logits) < 0.1, -torch.inf).softmax(-1).split([k, k + 1])
        x = torch.multinomial(q, 1)[:, 0] if k else torch.zeros(0, dtype=torch.int64)
        keys = randomness.StepKeys(torch.tensor([randomness.stream(i * 10**9, row)]), step, max(k, 1))
        outcome = verification.token(x[None], lengths, q[None], p[None], keys)
        outcome += verification.matching(x[None], lengths, p[None].argmax(-1))
        numbers = (randomness.uniform(randomness.Key(keys.stream, step, purpose, k)).item() for purpose in (1, 2, 3))
        given = {"seed": i * 10**9, "row": row, "step": i % 31, "x": x.tolist(), "q": q.tolist(), "p": p.tolist()}
        yield given, [*map(int, outcome), *numbers]


def test_rule_and_random_numbers_equal_python_and_mutants_do_not(call):
    asked, expected = map(list, zip(*decisions(), strict=True))
    assert call("decide", [RULE, asked]) == expected and {each[0] for each in expected} == set(range(6))
    assert call("survivors", [RULE, asked]) == []


def test_quoted_lines_stand_in_the_engine():
    engine = "\n".join(path.read_text("utf-8") for path in (ROOT / "bass_core").rglob("*.py"))
    quoted = re.findall(r"//> (.+)", RULE)
    assert len(quoted) >= 14 and [line for line in quoted if line not in engine] == []


WASM, PLAIN = "WebAssembly SIMD", "plain JavaScript"
SIZES = [(WASM, 64, 32), (PLAIN, 2, 16), pytest.param(PLAIN, 64, 32, marks=pytest.mark.ci)]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(("arithmetic", "rows", "most"), SIZES)
def test_tokens_and_accepted_lengths_equal_generate(call, arithmetic, rows, most, temperature):
    options, texts = {"temperature": temperature, "seed": 7}, SHORT[:rows]
    out = bass.generate(PAIR(), texts, draft_length=5, max_new_tokens=most, **options)
    kept = [steps.accepted.tolist() for _, steps in out.trace.steps.groupby("row")]
    given = [arithmetic == WASM, texts, options | {"k": 5, "newTokens": most}]
    assert call("decode", given) == [arithmetic, [ids.tolist() for ids in out.sequences], kept]


def test_clocks_and_tokenizer_equal_python(call):
    steps = [([n] * rows, k) for n in (10, 100, 500, 900) for rows in (1, 3, 8, 40) for k in (0, 1, 5, 10, 20)]
    for path in (EPYC, "bass_lab/assets/records/costs_h200.json"):
        cost = CostModel.load(ROOT / path)
        expected = [float(cost.step(len(lengths), k, lengths[0])) for lengths, k in steps]
        assert call("seconds", [f"/{path}", steps]) == pytest.approx(expected, rel=1e-12)
    texts = ["ü ½²x\n\n  y 12a", "漢字 🎉\t", "a\u0085 \ufeff b", "x<|endoftext|>\n", "don't  \r\n", ""]
    assert call("encode", texts) == [PAIR().tokenizer(text)["input_ids"] for text in texts]


def finished(page):
    """Wait for the end, and compare the page's texts with those of its Python program. Return the generation."""
    page.wait_for_function("document.getElementById('go').textContent === 'Run again'")
    exec(page.locator("#python pre").text_content(), names := {})
    texts = page.locator("#texts pre").all_text_contents()
    assert texts == [prompt + row.text for prompt, row in zip(names["prompts"], names["out"], strict=True)]
    return names["out"]


def test_page_names_the_gain_and_fetches_files_of_the_site_alone(opened):
    page, cost = opened("?clock=epyc"), CostModel.load(ROOT / EPYC)
    regular = bass.generate(PAIR(), prompt_set("mini", 8), draft_length=0, max_new_tokens=64)
    gain = predict(cost, regular.trace) / predict(cost, finished(page).trace)
    wanted = rf"Same text in 8 of 8 rows\. .* {gain:.2f} times as many tokens"
    assert re.match(wanted, page.inner_text("#status"))
    records = (ROOT / "bass_lab/assets/records/draft_lengths_embedded_cpu.jsonl").read_text().splitlines()
    wanted = {"method": "batched", "k": 5, "batch": 8, "prompt_set": "mini"}
    [record] = [line for line in map(json.loads, records) if wanted.items() <= line.items()]
    assert gain == pytest.approx(record["over_regular"]["median"], rel=0.1)
    site = page.url.partition("docs/")[0]
    assert all(url.startswith((site, "data:")) for url in page.fetched)
    paths = {url.removeprefix(site) for url in page.fetched if "?" not in url and url.startswith(site)}
    patterns = ast.literal_eval(re.search(r"FILES = (\(.*?\n\))", (ROOT / "docs/site.py").read_text(), re.S)[1])
    served = {path.relative_to(ROOT).as_posix() for pattern in patterns for path in ROOT.glob(pattern)}
    assert "bass_core/assets/target/model.safetensors" in paths <= served
    assert sum((ROOT / path).stat().st_size for path in served if "/explorer/" in path or "/assets/" in path) < 20e6


def test_narrow_page_works_by_keyboard_and_names_refused_settings(opened):
    page = opened("?rows=2&k=99&temperature=1&seed=5&draft=unaligned_draft&keep=all", width=380)
    finished(page)
    refused = "Draft length cannot be 99; the page takes 10. What rows keep cannot be all; the page takes ragged."
    assert page.inner_text("#note") == refused
    assert page.url.endswith("?k=10&rows=2&temperature=1&seed=5&draft=unaligned_draft")
    assert page.evaluate("document.documentElement.scrollWidth") <= 380
    page.locator("#raster button").first.focus()
    for key in ("ArrowRight", "ArrowDown", "Enter"):
        page.keyboard.press(key)
    assert page.inner_text("#opened-text").startswith("Text 2, pass 2:")


def test_missing_model_is_named(opened):
    page = opened("rule.js")
    page.route("**/target/model*", lambda route: route.fulfill(status=404))
    page.goto(page.url.removesuffix("rule.js"))
    page.get_by_text("Stopped: bass_core/assets/target/model.safetensors is missing (HTTP 404)").wait_for()
