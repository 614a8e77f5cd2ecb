"""Responses in OpenAI's format, whole or in chunks. Fields of this server are under the key `bass`."""

from __future__ import annotations

import itertools
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedTokenizerBase

from bass_core import options
from bass_core.detokenizer import FinalText
from bass_lab.serve.ends import Ended
from bass_lab.texts.pieces import bytes_of

# OpenAI's clients accept only "stop" and "length". The field `bass` has the engine's own reason.
FINISHED = {"eos": "stop", "stop": "stop", "length": "length", "budget": "length", "cancelled": "length"}


@dataclass
class _Row:
    """A streamed row. tokens, logprobs: not sent yet. texts: final texts of the first unsent tokens."""

    text: FinalText
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    sent: int = 0  # characters
    given: int = 0  # tokens with texts already sent


class Answer:
    """The response to a request. prompt_tokens: total over all prompts."""

    def __init__(
        self,
        chat: bool,
        model: str,
        tokenizer: PreTrainedTokenizerBase,
        prompt_tokens: int,
        seed: int,
        logprobs: bool,
        stop: str | Sequence[str],
    ):
        self._chat, self._tokenizer, self._prompt_tokens, self._seed = chat, tokenizer, prompt_tokens, seed
        self._logprobs, self._stop = logprobs, stop
        self._rows: dict[int, _Row] = {}
        prefix = "chatcmpl" if chat else "cmpl"
        self._head = {"id": f"{prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}

    def whole(self, ended: Sequence[Ended]) -> dict[str, Any]:
        """Return the whole response, with all rows in order."""
        choices = []
        for index, row in enumerate(ended):
            text, tokens = row.result.text, row.result.sequence.tolist()
            said = {"message": {"role": "assistant", "content": text}} if self._chat else {"text": text}
            logprobs = None
            if self._logprobs:
                texts = self._final_text().token_texts(tokens, ended=True)
                logprobs = self._of_tokens(texts, tokens, row.result.logprobs.tolist(), row.alternatives)
            choices.append({"index": index, **said, "logprobs": logprobs, **_end(row)})
        return self._object("") | {"choices": choices, **self._totals(ended)}

    def opening(self, index: int) -> dict[str, Any]:
        """Return the first chat chunk of a row."""
        delta = {"role": "assistant", "content": ""}
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        return self._object(".chunk") | {"choices": [choice]}

    def chunk(
        self,
        index: int,
        tokens: Sequence[int],
        logprobs: Sequence[float],
        alternatives: Sequence[dict[int, float]],
        ended: Ended | None,
    ) -> dict[str, Any] | None:
        """Return a row's next chunk after new tokens: newly final text, the row's end, or both. None: neither.
        alternatives: likeliest ids of all tokens so far."""
        if index not in self._rows:
            self._rows[index] = _Row(self._final_text())
        row = self._rows[index]
        row.tokens += tokens
        row.logprobs += logprobs
        row.texts += row.text.token_texts(tokens, ended=ended is not None)
        text, count = "".join(row.texts), len(row.texts)
        if not text and ended is None:
            return None
        said = {"delta": {"content": text} if text else {}} if self._chat else {"text": text}
        told = None
        if self._logprobs and count:
            told = self._of_tokens(row.texts, row.tokens, row.logprobs, alternatives[row.given :], row.sent)
        row.given += count
        row.tokens, row.logprobs, row.texts = row.tokens[count:], row.logprobs[count:], []
        row.sent += len(text)
        end = {"finish_reason": None} if ended is None else _end(ended)
        return self._object(".chunk") | {"choices": [{"index": index, **said, "logprobs": told, **end}]}

    def last(self, ended: Sequence[Ended]) -> dict[str, Any]:
        """Return the last chunk, with the counts of all rows."""
        return self._object(".chunk") | {"choices": [], **self._totals(ended)}

    def usage(self, generated: int) -> dict[str, int]:
        """Return the usage counts. generated: total tokens of all rows."""
        prompt = self._prompt_tokens
        return {"prompt_tokens": prompt, "completion_tokens": generated, "total_tokens": prompt + generated}

    def _object(self, suffix: str) -> dict[str, Any]:
        return self._head | {"object": f"chat.completion{suffix}" if self._chat else "text_completion"}

    def _totals(self, ended: Sequence[Ended]) -> dict[str, Any]:
        generated = sum(len(row.result.sequence) for row in ended)
        return {"usage": self.usage(generated), "bass": _counts(ended) | {"seed": self._seed}}

    def _final_text(self) -> FinalText:
        return FinalText(self._tokenizer, options.stop_strings(self._stop, self._tokenizer))

    def _of_tokens(
        self,
        texts: Sequence[str],
        tokens: Sequence[int],
        logprobs: Sequence[float],
        alternatives: Sequence[dict[int, float]],
        offset: int = 0,
    ) -> dict[str, Any]:
        """Return the log-probabilities of the tokens with a final text. offset: earlier characters of the row."""
        likeliest = [list(found.items()) for found in alternatives[: len(texts)]] or [[]] * len(texts)
        if self._chat:
            parts = zip(texts, tokens, logprobs, likeliest, strict=False)
            return {"content": [self._token(*one) | {"top_logprobs": self._named(most)} for *one, most in parts]}
        *offsets, _ = itertools.accumulate(map(len, texts), initial=offset)
        logprobs = list(logprobs[: len(texts)])
        # Of ids with equal texts, the likeliest counts.
        named = [{one["token"]: one["logprob"] for one in self._named(found[::-1])} for found in likeliest]
        top = [{text: value} | found for text, value, found in zip(texts, logprobs, named, strict=True)]
        found = {"tokens": texts, "token_logprobs": logprobs, "text_offset": offsets}
        return found | {"top_logprobs": top if alternatives else None}

    def _token(self, text: str, token: int, logprob: float) -> dict[str, Any]:
        return {"token": text, "logprob": logprob, "bytes": self._bytes(token, text)}

    def _named(self, likeliest: Sequence[tuple[int, float]]) -> list[dict[str, Any]]:
        """Return ids with log-probabilities as OpenAI's tokens. An impossible id has -9999, as in OpenAI's API."""
        return [self._token(self._tokenizer.decode([each]), each, max(value, -9999.0)) for each, value in likeliest]

    def _bytes(self, token: int, text: str) -> list[int] | None:
        """Return the bytes of a token, from which clients assemble characters split over tokens."""
        part = "\ufffd" in self._tokenizer.decode([token], skip_special_tokens=True)
        return bytes_of(token, self._tokenizer) if part else list(text.encode())


def _counts(rows: Sequence[Ended]) -> dict[str, Any]:
    """Return draft tokens, accepted tokens, and tokens per decode step (None without a decode step)."""
    drafted, accepted, decoded, steps = (
        sum(getattr(row, name) for row in rows) for name in ("drafted", "accepted", "decoded", "steps")
    )
    rate = round(decoded / steps, 3) if steps else None
    return {"drafted": drafted, "accepted": accepted, "tokens_per_step": rate}


def _end(row: Ended) -> dict[str, Any]:
    reason = row.result.finish_reason
    return {"finish_reason": FINISHED[reason], "bass": {"finish_reason": reason} | _counts([row])}
