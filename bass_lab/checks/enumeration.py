"""Compute the engine's exact output distribution by enumerating every random decision, and the target's."""

from __future__ import annotations

import torch

import bass_core as bass
from bass_lab.checks.oracle import Oracle
from bass_lab.checks.tabular import law

EXACT = 1e-12
PROMPT = [0, 1]


def law_of_engine(target, draft, new, draft_length, prompts=(PROMPT,), thresholds=None, **options):
    """Return the joint distribution of generate's sequences: {((tokens of row 0), (tokens of row 1), ...): p}."""
    pair = bass.ModelPair(target, draft)
    options = {"temperature": 1.0, "eos_token_id": (), "trace": "off", "attention": "pad"} | options

    def run():
        ids = [torch.tensor(prompt) for prompt in prompts]
        out = bass.generate(pair, ids, max_new_tokens=new, draft_length=draft_length(), **options)
        return tuple(tuple(sequence.tolist()) for sequence in out.sequences)

    return Oracle(thresholds).laws(run)


def exact_law(target, new, prompts=(PROMPT,), **processing):
    joint = {(): 1.0}
    for prompt in prompts:
        rows = law(target, prompt, new, **processing)
        joint = {(*seen, tokens): p * q for seen, p in joint.items() for tokens, q in rows.items()}
    return joint
