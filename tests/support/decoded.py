"""The texts of three prompts, from here and from transformers; a model with an adapter."""

import copy

import pytest
import torch
from tiny import BYTES, greedy_alone, ragged_prompts, tiny_model

import bass_core as bass

PROMPTS = ragged_prompts(3, 9, 5)


def greedy(pair):
    return [row.tolist() for row in bass.generate(pair, PROMPTS, max_new_tokens=16, eos_token_id=()).sequences]


def by_transformers(model):
    return [greedy_alone(model, prompt, 16).tolist() for prompt in PROMPTS]


def with_adapter(config=None):
    """A tiny model in a PeftModel, with an adapter that changes its text."""
    peft = pytest.importorskip("peft")  # here: a GPU box may be without it
    torch.manual_seed(1)
    lora = peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    return peft.get_peft_model(copy.deepcopy(tiny_model(vocab_size=BYTES)), config or lora).eval()
