from tiny import greedy_alone, ragged_prompts

import bass_core as bass

PROMPTS = ragged_prompts(3, 9, 5)


def greedy(pair):
    return [row.tolist() for row in bass.generate(pair, PROMPTS, max_new_tokens=16, eos_token_id=()).sequences]


def by_transformers(model):
    return [greedy_alone(model, prompt, 16).tolist() for prompt in PROMPTS]
