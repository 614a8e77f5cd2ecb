"""Summaries as the paper measured them for OPT: prompts from XSum (Narayan et al. 2018, arXiv 1808.08745), ROUGE-2.

XSum's licence is unknown, so it is not here: `load_articles` reads it from the hub, or a file of the same fields.
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
CUE = "\n\nTL;DR:"  # what makes a language model summarise untaught (Radford et al. 2019, section 3.6)
STOP = ("\n",)  # XSum's summaries are one sentence


@dataclass(frozen=True)
class Article:
    """document: the article's text. summary: one sentence written by its author."""

    id: str
    document: str
    summary: str


def load_articles(path: str | Path | None = None, *, split: str = "test", count: int | None = None) -> list[Article]:
    """The first `count` articles (None: all) of a file of JSON lines with the fields id, document, summary.

    None: XSum's `split` from the Hugging Face hub (package `datasets`). Raises ValueError naming the line for one that
    is no article, or why the hub could not be read; FileNotFoundError where there is no file.
    """

    def article(row: dict) -> Article:
        return Article(**{name: row[name] for name in FIELDS})

    if path is None:
        where = f"or give the path of a file of JSON lines with the fields {', '.join(FIELDS)}"
        # The hub's own conversion: `datasets` no longer runs a script that a data set may bring along.
        rows = hub_rows("EdinburghNLP/xsum", split=split, otherwise=where, revision="refs/convert/parquet")
        return [article(row) for row in islice(rows, count)]
    return file_rows(Path(path), article, f"an article with the fields {', '.join(FIELDS)}")[:count]


def prompts(articles: Sequence[Article], tokenizer: PreTrainedTokenizerBase, most: int) -> list[str]:
    """Each document, then a cue to summarise it. Documents are cut so that a prompt has about `most` tokens.

    A cut text may encode to a few tokens more or less than the tokens that it was cut from: leave room for them in the
    context. Raises ValueError where the cue alone does not fit.
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
    """ROUGE-2 (Lin 2004) of each prediction against its reference by the package `rouge-score`.

    One line each: precision, recall, fmeasure (in [0, 1]); use_stemmer (Porter's; it changes the figures) and the
    package's version are recorded in every line. Raises ValueError for lists of different lengths, or where the package
    is missing.
    """
    if len(predictions) != len(references):
        raise ValueError(f"{len(predictions)} predictions for {len(references)} references: they go in pairs")
    try:
        from rouge_score.rouge_scorer import RougeScorer
    except ImportError:
        raise ValueError("ROUGE needs the package rouge-score: pip install '.[eval]' in the checkout") from None
    scorer = RougeScorer(["rouge2"], use_stemmer=use_stemmer)
    found = [scorer.score(reference, text)["rouge2"] for text, reference in zip(predictions, references, strict=True)]
    return pd.DataFrame(found, columns=["precision", "recall", "fmeasure"]).assign(
        use_stemmer=use_stemmer, rouge_score=version("rouge-score")
    )
