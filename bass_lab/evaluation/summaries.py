"""Summarization, as in the paper's OPT experiment: prompts from XSum (Narayan et al. 2018, arXiv 1808.08745), ROUGE-2.

XSum's licence is unknown, so XSum is not included. `load_articles` reads XSum from the hub, or articles from a file.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from itertools import islice
from pathlib import Path

import pandas as pd
from transformers import PreTrainedTokenizerBase

from bass_lab.evaluation.problems import file_rows, hub_rows

FIELDS = ("id", "document", "summary")
CUE = "\n\nTL;DR:"  # makes a language model summarize zero-shot (Radford et al. 2019, section 3.6)
STOP = ("\n",)  # an XSum summary is a single sentence


@dataclass(frozen=True)
class Article:
    """document: the article's text. summary: a sentence by the article's author."""

    id: str
    document: str
    summary: str


def load_articles(path: str | Path | None = None, *, split: str = "test", count: int | None = None) -> list[Article]:
    """Return the first `count` articles (None: all) of a file of JSON lines with the fields id, document, summary.

    path: None reads XSum's `split` from the Hugging Face hub (package `datasets`). Raises ValueError for a line that is
    no article, or if the hub cannot be read; FileNotFoundError without a file.
    """

    def article(row: dict) -> Article:
        return Article(**{name: row[name] for name in FIELDS})

    if path is None:
        where = f"or give the path of a file of JSON lines with the fields {', '.join(FIELDS)}"
        # The hub's conversion to parquet, because `datasets` does not run loading scripts.
        rows = hub_rows("EdinburghNLP/xsum", split=split, otherwise=where, revision="refs/convert/parquet")
        return [article(row) for row in islice(rows, count)]
    return file_rows(Path(path), article, f"an article with the fields {', '.join(FIELDS)}")[:count]


def prompts(articles: Sequence[Article], tokenizer: PreTrainedTokenizerBase, most: int) -> list[str]:
    """Return a prompt per article: the document, cut so that the prompt has about `most` tokens, and the cue.

    A cut text may encode to a few more tokens, so leave space in the context. Raises ValueError if the cue alone does
    not fit.
    """
    room = most - len(tokenizer(CUE)["input_ids"])
    if room < 1:
        raise ValueError(f"most={most} tokens leave no room for a document before the cue {CUE!r}")
    texts = []
    for article in articles:
        ids = tokenizer(article.document, add_special_tokens=False)["input_ids"]
        document = article.document if len(ids) <= room else tokenizer.decode(ids[:room])
        texts.append(document.strip() + CUE)
    return texts


def rouge_2(predictions: Sequence[str], references: Sequence[str], *, use_stemmer: bool = True) -> pd.DataFrame:
    """Return ROUGE-2 (Lin 2004) of each prediction against the reference, computed by the package `rouge-score`.

    One line per prediction: precision, recall and fmeasure in [0, 1], use_stemmer (Porter's stemmer, which affects the
    values), and the package's version. Raises ValueError for lists of different lengths, or without the package.
    """
    if len(predictions) != len(references):
        raise ValueError(f"each prediction needs a reference, got {len(predictions)} and {len(references)}")
    try:
        from rouge_score.rouge_scorer import RougeScorer
    except ImportError:
        raise ValueError("ROUGE needs the package rouge-score: pip install '.[eval]' in the checkout") from None
    scorer = RougeScorer(["rouge2"], use_stemmer=use_stemmer)
    found = [scorer.score(reference, text)["rouge2"] for text, reference in zip(predictions, references, strict=True)]
    return pd.DataFrame(found, columns=["precision", "recall", "fmeasure"]).assign(
        use_stemmer=use_stemmer, rouge_score=version("rouge-score")
    )
