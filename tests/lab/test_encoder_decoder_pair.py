import pytest
import torch
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

import bass_core as bass
from bass_core.loading.model_pair import ASSETS, READER
from bass_lab.evaluation import load_problems
from bass_lab.pair import encoder_decoder, encoder_decoder_card
from bass_lab.pair.data_card import acceptance, share_passed
from bass_lab.texts import grammar
from bass_lab.texts.prompt_sets import prompt_set

TINY = encoder_decoder.ReaderRecipe(
    context=128,
    functions=60,
    batch_tokens=256,
    target=encoder_decoder._sizes(32, 1, 2, 2),
    draft=encoder_decoder._sizes(16, 1, 1, 2),
    target_tokens=7 * 512,
    draft_tokens=2 * 512,
    aligning_tokens=2 * 512,
    target_texts=4,
)


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(ASSETS / READER / "target")


@pytest.fixture(scope="module")
def functions():
    return grammar.functions(60, 5, held_out=False)


def test_a_batch_pairs_each_source_with_its_text(functions, tokenizer):
    sources, texts = encoder_decoder.encoded(functions, tokenizer)
    pairs = encoder_decoder.Pairs(sources, texts, 1024)
    batch = pairs.batch(0.0, torch.Generator().manual_seed(0))
    given, written = encoder_decoder.split(batch)
    known = {tuple(source): text for source, text in zip(sources, texts, strict=True)}
    assert len(batch) > 5
    for read, kept, begun, text in zip(*given.values(), written, strict=True):
        wanted = known[tuple(read[kept.bool()].tolist())]
        assert text[text != encoder_decoder.UNUSED].tolist() == wanted
        assert begun[: len(wanted)].tolist() == [0, *wanted[:-1]]


def test_padding_does_not_change_a_loss(functions, tokenizer):
    sources, texts = encoder_decoder.encoded(functions[:2], tokenizer)
    torch.manual_seed(0)
    model = encoder_decoder.new_model(TINY.target, TINY.context, tokenizer).eval()

    def loss(rows):
        pairs = encoder_decoder.Pairs([sources[row] for row in rows], [texts[row] for row in rows], 512)
        return float(encoder_decoder.loss_of(model, pairs.batch(0.0, torch.Generator())))

    alone = sum(loss([row]) * len(texts[row]) for row in (0, 1)) / sum(map(len, texts))
    assert loss([0, 1]) == pytest.approx(alone, rel=1e-5)


@pytest.mark.ci
def test_interrupted_training_resumes(tmp_path):
    report = encoder_decoder.train(TINY, tmp_path / "out", tmp_path / "work")
    assert report["target training"]["last_loss"] < report["target training"]["first_loss"]
    pair = bass.load_pair(tmp_path / "out" / "target", tmp_path / "out" / "draft")
    out = bass.generate(pair, "def f(x):\n", max_new_tokens=6, draft_length=2)
    ids = pair.tokenizer("def f(x):\n", return_tensors="pt")["input_ids"]
    assert pair.target.generate(ids, max_new_tokens=6)[0, 1:].tolist() == out[0].sequence.tolist()
    (tmp_path / "work" / "alignment.pt").unlink()
    again = encoder_decoder.train(TINY, tmp_path / "again", tmp_path / "work")
    assert again["alignment training"]["last_loss"] == pytest.approx(report["alignment training"]["last_loss"])


def test_shipped_pair_is_small_and_loads_in_transformers(tokenizer):
    files = list((ASSETS / READER).glob("*/model.safetensors"))
    assert len(files) == 2 and sum(file.stat().st_size for file in files) < 4.6e6
    model = AutoModelForSeq2SeqLM.from_pretrained(ASSETS / READER / "target", dtype=torch.float32)
    source = 'def count_even(numbers):\n    """Return how many of the numbers are even."""\n'
    ids = model.generate(tokenizer(source, return_tensors="pt")["input_ids"], max_new_tokens=64)[0]
    compile(source + tokenizer.decode(ids, skip_special_tokens=True), "written", "exec")


def test_shipped_pair_solves_problems_and_its_draft_is_accepted():
    pair, problems = bass.load_pair(READER, dtype="float32"), load_problems()[:8]
    out = bass.generate(pair, [problem.prompt for problem in problems], max_new_tokens=96)
    assert share_passed(problems, out.texts) > 0.5
    assert acceptance(pair, prompt_set("mini", 6))["alpha"] > 0.7


def test_card_holds_the_measurements(tmp_path):
    stage = {"tokens": 512, "steps": 1, "seconds": 60.0, "first_loss": 6.5, "last_loss": 6.25}
    size = {"parameters": 1234, "megabytes": 2.5}
    trained = {f"{name} training": stage for name in ("target", "draft", "alignment")}
    trained |= {"target": size, "draft": size, "seed": 0, "machine": "a machine"}
    figures = {"alpha": 0.875, "held_out": {"target": 0.125, "draft": 0.375}}
    card = encoder_decoder_card.card(figures, trained, TINY)
    for words in ("3 minutes", "a machine", "| alpha | 0.875 |", "1 + 2 × 32", "| 0.125 | 0.375 |", "1,234"):
        assert words in card
