"""Train a tokenizer, and cut documents into training windows."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

END_OF_TEXT = "<|endoftext|>"


def train_tokenizer(texts: Iterable[str], vocab_size: int = 1024, context: int = 1024) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer that reproduces every text exactly and adds no special tokens.

    `<|endoftext|>` (id 0) ends a text and pads a batch. No token begins a text.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            # A newline is a separate token. Merged with the next line's indentation, newlines would be rare inside
            # texts, and the newline at the end of a prompt would make the model stop.
            pre_tokenizers.Split("\n", "isolated"),
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        clean_up_tokenization_spaces=False,
        model_max_length=context,
        padding_side="left",
    )


class Windows:
    """Random windows of one stream of documents of one kind. The end-of-text token follows each document.

    Half of the windows start at the beginning of a document, as prompts do.
    """

    def __init__(self, documents: list[str], tokenizer: PreTrainedTokenizerBase):
        # not verbose: no warning for documents longer than the context
        encoded = tokenizer(documents, verbose=False)["input_ids"]
        lengths = torch.tensor([len(ids) + 1 for ids in encoded])
        self.starts = lengths.cumsum(0) - lengths  # [documents]
        self.stream = torch.tensor([token for ids in encoded for token in (*ids, tokenizer.eos_token_id)])

    def take(self, count: int, length: int, generator: torch.Generator) -> Tensor:
        """Return windows [count, length]. Raises ValueError if the stream is shorter than a window."""
        last = len(self.stream) - length
        if last < 0:
            raise ValueError(f"a window of {length} tokens does not fit in a stream of {len(self.stream)}")
        anywhere = torch.randint(0, last + 1, (count,), generator=generator)
        begins = self.starts[torch.randint(0, len(self.starts), (count,), generator=generator)].clamp(max=last)
        at = torch.where(torch.rand(count, generator=generator) < 0.5, begins, anywhere)
        return self.stream[at[:, None] + torch.arange(length)]
