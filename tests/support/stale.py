import torch

import bass_core as bass


@torch.inference_mode()
def poison_stale_slots(session: bass.Session, value: float = 1e4) -> int:
    """Fill all KV slots beyond a row's text or source in the caches of both models. Return the number of buffers."""
    live, poisoned = len(session.rows.live), 0
    known = [(session.target, session.rows.lengths_host - 1)]
    if (draft := getattr(session.drafter, "runner", None)) is not None:
        known.append((draft, session.drafter.cached))
    for runner, lengths in known:
        parts = [(runner.cache, lengths)]
        if (sources := getattr(runner.cache, "sources", None)) is not None:
            parts.append((sources, sources.lengths))
        for cache, ends in parts:
            for buffer in cache.buffers():
                poisoned += 1
                for place in range(session.rows.max_rows):
                    buffer[place, :, int(ends[place]) if place < live else 0 :] = value
    return poisoned


def texts_over_poison(pair: bass.ModelPair, prompts: list[torch.Tensor], new: int) -> list[list[int]]:
    with bass.Session(pair, max_batch_size=3, draft_length=3, eos_token_id=()) as session:
        handles = [session.submit(prompt, max_new_tokens=new) for prompt in prompts]
        while not session.idle:
            session.step()
            poison_stale_slots(session)
        return [session.result(handle).sequence.tolist() for handle in handles]
