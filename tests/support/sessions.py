import torch
from tiny import ragged_prompts, tiny_model

import bass_core as bass

TARGET = tiny_model(dtype="float64")
DRAFT = tiny_model(dtype="float64", noise=0.02)
PAIR = bass.ModelPair(TARGET, DRAFT)
PERFECT = bass.ModelPair(TARGET, TARGET)  # every draft is accepted
PROMPTS = ragged_prompts(5, 9, 13, 7)
SAMPLED = {"temperature": 0.8, "seed": 3}


def session_over(pair=PAIR, **options) -> bass.Session:
    return bass.Session(pair, **({"eos_token_id": (), "draft_length": 3} | options))


def generate(prompts=PROMPTS, pair=PAIR, **options) -> bass.Generation:
    return bass.generate(pair, prompts, **({"eos_token_id": (), "draft_length": 3, "max_new_tokens": 12} | options))


def run_to_the_end(session: bass.Session) -> None:
    while not session.idle:
        session.step()


def alone(row: int, prompt, new: int, **options):
    session = session_over(max_batch_size=1, **options)
    for _ in range(row):
        session.submit(prompt, max_new_tokens=0)  # random numbers depend on the row's number
    handle = session.submit(prompt, max_new_tokens=new)
    run_to_the_end(session)
    return session.result(handle)


def assert_same_result(result, expected) -> None:
    assert result.sequence.tolist() == expected.sequence.tolist()
    assert torch.allclose(result.logprobs, expected.logprobs)
    assert result.finish_reason == expected.finish_reason
