"""The explorer in docs/explorer equals the Python engine: rule, tokens, accepted lengths, clocks and tokenizer."""

import ast
import contextlib
import functools
import io
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
from bass_core.exactness.randomness import Key, StepKeys
from bass_core.policies.costs import CostModel
from bass_lab.measure.modelled_costs import predict
from bass_lab.show import browser
from bass_lab.texts.prompt_sets import prompt_set

RULE = (ROOT / "docs/explorer/rule.js").read_text("utf-8")
EPYC = "bass_core/assets/costs/amd-epyc-2-threads-dfc6af2c9333.json"
H200 = "bass_lab/assets/records/costs_h200.json"
ENDED = "document.getElementById('go').textContent === 'Run again'"
DECIDE = """async ([source, vectors]) => {
    const rule = await import(URL.createObjectURL(new Blob([source], { type: "text/javascript" })));
    return vectors.map(({ seed, row, step, x, q, p }) => {
        const key = { stream: rule.stream(seed, row), step }, floats = (rows) => rows.map((each) => Float32Array.from(each));
        const random = (purpose, slot) => rule.uniform(key, purpose, slot);
        const token = rule.verify(x, floats(q), floats(p), random), greedy = rule.matching(x, floats(p));
        const numbers = [1n, 2n, 3n].map((purpose) => random(purpose, x.length));
        return [token.accepted, token.next, greedy.accepted, greedy.next, ...numbers];
    });
}"""
DECODE = """async ([simd, texts, options]) => {
    const [{ arena }, { Llama, Runner, safetensors }, { Batch }, { Tokenizer }] =
        await Promise.all(["matmul", "llama", "rule", "tokenizer"].map((name) => import(`/docs/explorer/${name}.js`)));
    const memory = await arena(240, simd), file = (path) => fetch(`/bass_core/assets/${path}`);
    const load = async (name) => new Runner(new Llama(await (await file(`${name}/config.json`)).json(),
        safetensors(await (await file(`${name}/model.safetensors`)).arrayBuffer(), memory), memory), texts.length, 128);
    const tokenizer = new Tokenizer(await (await file("target/tokenizer.json")).json());
    const prompts = texts.map((text) => tokenizer.encode(text)), kept = texts.map(() => []);
    const batch = new Batch(await load("target"), await load("draft"), prompts, { ...options, endOfText: tokenizer.end });
    while (batch.live.length) for (const { row, accepted } of batch.step()) kept[row.id].push(accepted);
    return { name: memory.name, tokens: batch.rows.map(({ id, tokens }) => tokens.slice(prompts[id].length)), kept };
}"""
MUTANTS = {
    "Math.min(1, p_x / q_x)": "Math.min(1, q_x / p_x)",
    "numbers[accepted] < chances[accepted]": "numbers[accepted] > chances[accepted]",
    "Math.max(0, p_y - q[accepted][y])": "Math.abs(p_y - q[accepted][y])",
    "if (accepted < x.length) { ": "if (false) { ",
    "let weights = p[accepted];": "let weights = p[0];",
    "random(ACCEPT, accepted)": "random(ACCEPT, 0)",
    "draw(weights, random(TARGET, 0))": "draw(weights, random(ACCEPT, accepted))",
    "(sum += weight) > u * total": "(sum += weight) > u",
    "wrong < 0 ? x.length : wrong": "wrong < 0 ? x.length - 1 : wrong",
    "prob > probs[best] ? id : best": "prob < probs[best] ? id : best",
    "Number(bits >> 12n)": "Number(bits >> 11n) / 2 % 1",
    "BigInt(slot) * 8n + purpose": "BigInt(slot) + purpose",
}


@pytest.fixture(scope="module")
def site():
    quiet = type("Quiet", (SimpleHTTPRequestHandler,), {"log_message": lambda *_: None})
    with ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(quiet, directory=ROOT)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


@pytest.fixture(scope="module")
def chromium():
    lesson_runs.chromium()
    with browser.launched() as running:
        yield running


@pytest.fixture
def page(chromium, site):
    page = chromium.new_page(viewport={"width": 1920, "height": 1080})
    page.set_default_timeout(browser.PATIENCE * 1000)
    page.goto(site + "docs/explorer/rule.js")
    yield page
    page.close()


@pytest.fixture(scope="module")
def pair():
    return bass.load_pair()


def vectors():
    """Return 400 decisions, some with probabilities of 0, and the outcomes of the Python engine."""
    torch.manual_seed(0)
    asked, expected = [], []
    for i in range(400):
        k, seed, row, step = i % 6, i // 7 * 10**9, i % 8, i % 31
        logits = torch.randn(2 * k + 1, 8) * (1 + i % 4)
        probs = logits.masked_fill(torch.rand_like(logits) < 0.1, -torch.inf).softmax(-1)
        q, p = probs[:k], probs[k:] if i % 2 else (probs[k:] + probs[-1]) / 2
        x = torch.multinomial(q, 1)[:, 0] if k else torch.zeros(0, dtype=torch.int64)
        keys = StepKeys(torch.tensor([randomness.stream(seed, row)]), torch.tensor([step]), max(k, 1))
        lengths = torch.tensor([k])
        outcomes = (
            verification.token(x[None], lengths, q[None], p[None], keys),
            verification.matching(x[None], lengths, p[None].argmax(-1)),
        )
        numbers = [randomness.uniform(Key(keys.stream, keys.counter, purpose, k)).item() for purpose in (1, 2, 3)]
        expected.append([int(each) for outcome in outcomes for each in outcome] + numbers)
        lists = {"x": x.tolist(), "q": q.tolist(), "p": p.tolist()}
        asked.append({"seed": seed, "row": row, "step": step} | lists)
    return asked, expected


def test_rule_and_random_numbers_equal_python_and_mutants_do_not(page):
    asked, expected = vectors()
    assert page.evaluate(DECIDE, [RULE, asked]) == expected
    assert {tuple(each[:2]) for each in expected} >= {(0, 1), (5, 1)}
    for old, new in MUTANTS.items():
        assert RULE.count(old) == 1, old
        assert page.evaluate(DECIDE, [RULE.replace(old, new), asked]) != expected, new


def test_quoted_lines_stand_in_the_engine():
    engine = [
        line.strip() for path in (ROOT / "bass_core").rglob("*.py") for line in path.read_text("utf-8").splitlines()
    ]
    quoted = re.findall(r"//> (.+)", RULE)
    assert len(quoted) >= 8 and [line for line in quoted if not any(each.startswith(line) for each in engine)] == []


SHORT = [prompt.splitlines()[0] + "\n" for prompt in prompt_set("mini", 64)]
FULL = [(simd, temperature, 64, 32) for simd in (True, False) for temperature in (0.0, 1.0)]


@pytest.mark.parametrize(
    ("simd", "temperature", "rows", "most"),
    [
        *FULL[:2],
        (False, 0.0, 4, 16),
        (False, 1.0, 4, 16),
        *(pytest.param(*full, marks=pytest.mark.ci) for full in FULL[2:]),
    ],
)
def test_tokens_and_accepted_lengths_equal_generate(page, pair, simd, temperature, rows, most):
    options = {"temperature": temperature, "seed": 7}
    out = bass.generate(pair, SHORT[:rows], draft_length=5, max_new_tokens=most, **options)
    found = page.evaluate(DECODE, [simd, SHORT[:rows], options | {"k": 5, "newTokens": most}])
    assert found["name"] == ("WebAssembly SIMD" if simd else "plain JavaScript")
    assert found["tokens"] == [ids.tolist() for ids in out.sequences]
    assert found["kept"] == [group.accepted.tolist() for _, group in out.trace.steps.groupby("row")]


def test_clocks_equal_cost_models(page):
    steps = [([n] * rows, k) for n in (10, 100, 500, 900) for rows in (1, 3, 8, 40) for k in (0, 1, 5, 10, 20)]
    ask = """async ([path, steps]) => {
        const { recordedClock } = await import("/docs/explorer/clock.js"), clock = recordedClock(await (await fetch(path)).json());
        return steps.map(([lengths, k]) => clock({ lengths, k, drafter: true }));
    }"""
    for path in (EPYC, H200):
        cost = CostModel.load(ROOT / path)
        expected = [float(cost.step(len(lengths), k, lengths[0])) for lengths, k in steps]
        assert page.evaluate(ask, [f"/{path}", steps]) == pytest.approx(expected, rel=1e-12)


def test_tokenizer_equals_python(page, pair):
    texts = ["ü ½²x\n\n  y 12a", "漢字 🎉\t", "a\u0085 \ufeff b", "x<|endoftext|>\n", "don't  \r\n", ""]
    ask = """async (texts) => {
        const { Tokenizer } = await import("/docs/explorer/tokenizer.js");
        const tokenizer = new Tokenizer(await (await fetch("/bass_core/assets/target/tokenizer.json")).json());
        return texts.map((text) => tokenizer.encode(text));
    }"""
    assert page.evaluate(ask, texts) == [pair.tokenizer(text)["input_ids"] for text in texts]


def program_of(page):
    """Run the page's Python program, compare its texts with the page's, and return its generation."""
    names = {}
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(page.locator("#python pre").text_content(), names)
    texts = page.locator("#texts pre").all_text_contents()
    assert (
        printed.getvalue()
        == "\n\n".join(text.removeprefix(prompt) for text, prompt in zip(texts, names["prompts"], strict=True)) + "\n"
    )
    return names["out"]


def test_page_decodes_races_and_fetches_from_its_host(page, pair, site):
    fetched = []
    page.on("request", lambda request: fetched.append(request.url))
    page.goto(site + "docs/explorer/?clock=epyc")
    page.wait_for_function(ENDED)
    ours, cost = program_of(page), CostModel.load(ROOT / EPYC)
    regular = bass.generate(pair, prompt_set("mini", 8), draft_length=0, max_new_tokens=64)
    gain = predict(cost, regular.trace) / predict(cost, ours.trace)
    verdict = page.inner_text("#status")
    assert "Same text in 8 of 8 rows" in verdict and f"{gain:.2f} times as fast" in verdict
    lines = map(
        json.loads, (ROOT / "bass_lab/assets/records/draft_lengths_embedded_cpu.jsonl").read_text().splitlines()
    )
    wanted = {"method": "batched", "k": 5, "batch": 8, "prompt_set": "mini"}
    [record] = [line for line in lines if wanted.items() <= line.items()]
    assert gain == pytest.approx(record["over_regular"]["median"], rel=0.1)
    page.goto(site + "docs/explorer/?draft=unaligned_draft")
    page.wait_for_function(ENDED)
    assert all(url.startswith((site, "data:")) for url in fetched)
    paths = {url.removeprefix(site).partition("?")[0] for url in fetched if url.startswith(site)} - {"docs/explorer/"}
    site_py = ast.parse((ROOT / "docs/site.py").read_text("utf-8")).body
    [patterns] = [ast.literal_eval(each.value) for each in site_py if ast.unparse(each).startswith("FILES")]
    assert paths <= {path.relative_to(ROOT).as_posix() for pattern in patterns for path in ROOT.glob(pattern)}
    assert sum((ROOT / path).stat().st_size for path in paths) < 20e6


def test_narrow_page_works_by_keyboard_and_says_what_it_changed(page, site):
    page.set_viewport_size({"width": 380, "height": 800})
    page.goto(site + "docs/explorer/?rows=2&k=99&temperature=1&seed=5&draft=nobody")
    page.wait_for_function(ENDED)
    assert "k cannot be 99; the page takes 10." in page.inner_text("#note") and page.url.endswith(
        "?k=10&rows=2&temperature=1&seed=5"
    )
    assert page.evaluate("document.documentElement.scrollWidth") <= 380
    page.locator("#raster button").first.focus()
    for key in ("ArrowRight", "ArrowDown", "Enter"):
        page.keyboard.press(key)
    assert page.inner_text("#opened-text").startswith("Text 2, pass 2:")
    program_of(page)


def test_missing_model_is_named(page, site):
    page.route("**/target/model.safetensors", lambda route: route.fulfill(status=404))
    page.goto(site + "docs/explorer/")
    page.get_by_text("Stopped: bass_core/assets/target/model.safetensors is missing (HTTP 404)").wait_for()
