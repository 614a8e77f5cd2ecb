import torch
from tiny import ragged_prompts, tiny_model
from torch.utils._python_dispatch import TorchDispatchMode

import bass_core as bass

PROMPTS = ragged_prompts(5, 11)


class Operators(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.met = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.met.append((function._schema.name.split("::")[-1], getattr(args[0], "shape", None) if args else None))
        return function(*args, **(kwargs or {}))

    def count(self, *names):
        return sum(each in names for each, _ in self.met)


def model(architecture="llama", **changes):
    return tiny_model.__wrapped__(architecture, **changes)


def texts(models, **options):
    options = {"draft_length": 2, "max_new_tokens": 12, "eos_token_id": ()} | options
    return [s.tolist() for s in bass.generate(models, PROMPTS, **options).sequences]


@torch.no_grad()
def logits(own):
    return own(torch.stack(ragged_prompts(9, 9))).logits
