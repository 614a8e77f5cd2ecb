import json
import sys
from dataclasses import asdict
from types import SimpleNamespace

import pytest
from tiny import byte_tokenizer

from bass_lab.evaluation import summaries
from bass_lab.evaluation.summaries import Article, load_articles, prompts, rouge_2

ARTICLES = [
    Article("1", "The cat sat on the mat all day.\nNobody asked why.", "A cat sat on a mat."),
    Article("2", "Rain fell on the town again.", "It rained in the town."),
]


def test_articles_are_read_from_a_file(tmp_path):
    path = tmp_path / "articles.jsonl"
    path.write_text("".join(json.dumps(asdict(article)) + "\n" for article in ARTICLES))
    assert load_articles(path) == ARTICLES and load_articles(path, count=1) == ARTICLES[:1]
    path.write_text(path.read_text() + '{"id": 3}\n')
    with pytest.raises(ValueError, match="line 3 is not an article"):
        load_articles(path)


def test_xsum_comes_from_the_hub(monkeypatch):
    asked = []

    def load_dataset(name, **options):
        asked.append((name, options["split"]))
        return [asdict(article) for article in ARTICLES]

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    assert load_articles() == ARTICLES and load_articles(split="validation", count=1) == ARTICLES[:1]
    assert asked == [("EdinburghNLP/xsum", "test"), ("EdinburghNLP/xsum", "validation")]
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ValueError, match="path of a file of JSON lines with the fields id, document, summary"):
        load_articles()


def test_prompts_end_with_the_cue_and_long_documents_are_cut():
    tokenizer, cue = byte_tokenizer(), summaries.CUE
    assert prompts(ARTICLES, tokenizer, 200) == [article.document + cue for article in ARTICLES]
    cut = prompts(ARTICLES, tokenizer, 20)
    assert cut[0].endswith(cue) and ARTICLES[0].document.startswith(cut[0].removesuffix(cue))
    assert [len(tokenizer(text)["input_ids"]) <= 20 for text in cut] == [True, True]
    with pytest.raises(ValueError, match="leave no room"):
        prompts(ARTICLES, tokenizer, len(cue))


def test_rouge_2_counts_pairs_of_words_and_records_the_stemmer():
    pytest.importorskip("rouge_score", reason="the optional package rouge-score is not installed")
    predictions, references = ["the cats sat on the mat", "nothing"], ["the cat sat on a mat", "something else"]
    stemmed, plain = (rouge_2(predictions, references, use_stemmer=use) for use in (True, False))
    # of 5 pairs each, "the cat", "cat sat" and "sat on" are shared after stemming plurals
    assert list(stemmed.fmeasure) == pytest.approx([3 / 5, 0]) and list(plain.fmeasure) == pytest.approx([1 / 5, 0])
    assert stemmed.use_stemmer.all() and not plain.use_stemmer.any()
    assert stemmed.rouge_score.str.match(r"\d+\.").all()


def test_rouge_2_refuses_wrong_counts_and_a_missing_package(monkeypatch):
    with pytest.raises(ValueError, match="each prediction needs a reference, got 1 and 2"):
        rouge_2(["a"], ["a", "b"])
    monkeypatch.setitem(sys.modules, "rouge_score", None)
    monkeypatch.setitem(sys.modules, "rouge_score.rouge_scorer", None)
    with pytest.raises(ValueError, match="needs the package rouge-score"):
        rouge_2(["a"], ["a"])
