"""Answers in OpenAI's shapes, whole or in chunks; what is this server's own stands under the key `bass`."""

from __future__ import annotations

import itertools
import time
import uuid
from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from bass_lab.serve.driver import Ended
from bass_lab.texts.pieces import Pieces, bytes_of

# OpenAI's clients accept no others than "stop" and "length" of a text; the engine's own reason stands beside it.
FINISHED = {"eos": "stop", "stop": "stop", "length": "length", "budget": "length", "cancelled": "length"}


class Answer:
    """One request's answer. prompt_tokens: of all its prompts together."""

    def __init__(
        self,
        chat: bool,
        model: str,
        tokenizer: PreTrainedTokenizerBase,
        rows: int,
        prompt_tokens: int,
        seed: int,
        logprobs: bool,
    ):
        self._chat, self._tokenizer, self._prompt_tokens, self._seed = chat, tokenizer, prompt_tokens, seed
        self._logprobs = logprobs
        self._pieces = [Pieces(tokenizer) for _ in range(rows)]
        self._offsets = [0] * rows  # characters of each row told so far
        prefix = "chatcmpl" if chat else "cmpl"
        self._head = {"id": f"{prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}

    def whole(self, ended: Sequence[Ended]) -> dict[str, Any]:
        """All rows, in order."""
        choices = []
        for index, row in enumerate(ended):
            text, tokens = row.result.text, row.result.sequence.tolist()
            said = {"message": {"role": "assistant", "content": text}} if self._chat else {"text": text}
            logprobs = self._of_tokens(index, tokens, row.result.logprobs.tolist())
            choices.append({"index": index, **said, "logprobs": logprobs, **_end(row)})
        return self._object("") | {"choices": choices, **self._totals(ended)}

    def opening(self, index: int) -> dict[str, Any]:
        """A chat's first chunk for a row."""
        choice = {
            "index": index,
            "delta": {"role": "assistant", "content": ""},
            "logprobs": None,
            "finish_reason": None,
        }
        return self._object(".chunk") | {"choices": [choice]}

    def piece(
        self, index: int, text: str, tokens: Sequence[int], logprobs: Sequence[float], ended: Ended | None
    ) -> dict[str, Any]:
        """What a row gained, or its end."""
        said = {"delta": {"content": text} if text else {}} if self._chat else {"text": text}
        told = self._of_tokens(index, tokens, logprobs) if tokens else None
        end = {"finish_reason": None} if ended is None else _end(ended)
        return self._object(".chunk") | {"choices": [{"index": index, **said, "logprobs": told, **end}]}

    def last(self, ended: Sequence[Ended]) -> dict[str, Any]:
        """The chunk with the counts of all rows."""
        return self._object(".chunk") | {"choices": [], **self._totals(ended)}

    def usage(self, generated: int) -> dict[str, int]:
        """The counts of all rows, which have so many tokens together."""
        return {
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": generated,
            "total_tokens": self._prompt_tokens + generated,
        }

    def _object(self, suffix: str) -> dict[str, Any]:
        return self._head | {"object": f"chat.completion{suffix}" if self._chat else "text_completion"}

    def _totals(self, ended: Sequence[Ended]) -> dict[str, Any]:
        own = {
            "drafted": sum(row.drafted for row in ended),
            "accepted": sum(row.accepted for row in ended),
            "tokens_per_step": _rate(sum(row.decoded for row in ended), sum(row.steps for row in ended)),
            "seed": self._seed,
        }
        return {"usage": self.usage(sum(len(row.result.sequence) for row in ended)), "bass": own}

    def _of_tokens(self, index: int, tokens: Sequence[int], logprobs: Sequence[float]) -> dict[str, Any] | None:
        if not self._logprobs:
            return None
        texts = [self._pieces[index].add(token) for token in tokens]  # joined they are the text
        if self._chat:
            return {
                "content": [
                    {"token": text, "logprob": logprob, "bytes": self._bytes(token, text), "top_logprobs": []}
                    for token, text, logprob in zip(tokens, texts, logprobs, strict=True)
                ]
            }
        *offsets, self._offsets[index] = itertools.accumulate(map(len, texts), initial=self._offsets[index])
        return {"tokens": texts, "token_logprobs": list(logprobs), "top_logprobs": None, "text_offset": offsets}

    def _bytes(self, token: int, text: str) -> list[int] | None:
        """A token's bytes, of which clients make characters that are split over tokens."""
        part = "\ufffd" in self._tokenizer.decode([token], skip_special_tokens=True)
        return bytes_of(token, self._tokenizer) if part else list(text.encode())


def _rate(tokens: int, steps: int) -> float | None:
    """Tokens per decode step; None without one."""
    return round(tokens / steps, 3) if steps else None


def _end(row: Ended) -> dict[str, Any]:
    reason = row.result.finish_reason
    own = {
        "finish_reason": reason,
        "drafted": row.drafted,
        "accepted": row.accepted,
        "tokens_per_step": _rate(row.decoded, row.steps),
    }
    return {"finish_reason": FINISHED[reason], "bass": own}
