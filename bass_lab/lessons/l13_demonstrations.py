"""Lesson 13: cross-attention, acceptance by source, four decoding methods, and a state rolled back."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pandas as pd
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import Qwen3NextConfig, Qwen3NextForCausalLM
from transformers.utils import logging

from bass_core.generation import Generation, generate
from bass_core.loading.model_pair import ModelPair
from bass_core.model.forward_pass import Pass
from bass_core.model.patching import changed
from bass_core.model.recurrent import RowState, Tokens
from bass_core.prompts import first_ids, token_ids
from bass_core.session import Session
from bass_lab.checks import plain_decoding
from bass_lab.lessons.settings import is_exact
from bass_lab.measure.clocks import Elapsed
from bass_lab.measure.ratios import Ratio

WAYS = ("ours, speculative", "ours, regular", "transformers, batched", "transformers, assisted one by one")


@torch.no_grad()
def cross_attention(pair: ModelPair, source: str, text: Sequence[int]) -> pd.DataFrame:
    """Return the last layer's cross-attention, mean over heads: [written token, source token]."""
    model = copy.deepcopy(pair.target).float().cpu()  # independent of the pair's dtype
    model.set_attn_implementation("eager")
    read = token_ids(pair, [source])[0]
    begun = torch.tensor([*first_ids(model, model.generation_config), *text])[None, :-1]
    out = model(input_ids=read[None], decoder_input_ids=begun, output_attentions=True, use_cache=False)
    weights = out.cross_attentions[-1][0].mean(0)  # [T, S]

    def named(ids: Sequence[int]) -> list[str]:
        return [f"{place} {pair.tokenizer.decode([token])!r}" for place, token in enumerate(ids)]

    return pd.DataFrame(weights.float().numpy(), index=named(text), columns=named(read.tolist()))


def by_source(generation: Generation, sources: Sequence[str], lengths: Sequence[int]) -> pd.DataFrame:
    """Return per source: source tokens, written tokens, draft tokens, α and tokens per step of its row."""
    steps = generation.trace.steps.query("kind == 'decode'")
    lines = []
    for row, (source, length) in enumerate(zip(sources, lengths, strict=True)):
        own = steps[steps.row == row]
        tried = int((own.accepted + (own.accepted < own.drafted)).sum())
        docstring = source.split('"""')[1] if '"""' in source else source
        line = {"source": docstring[:60], "source tokens": length, "written": len(generation[row].sequence)}
        line |= {"drafted": int(own.drafted.sum()), "α": own.accepted.sum() / max(tried, 1)}
        lines.append(line | {"tokens per step": own.emitted.sum() / max(len(own), 1)})
    return pd.DataFrame(lines)


def written(pair: ModelPair, way: str, sources: Sequence[Tensor], draft_length: int, most: int) -> list[list[int]]:
    """Return the greedy texts of these sources by one of `WAYS`, each up to its end or `most` tokens."""
    if way.startswith("ours"):
        k = draft_length if way == WAYS[0] else 0
        out = generate(pair, sources, max_new_tokens=most, draft_length=k, trace="off")
        return [sequence.tolist() for sequence in out.sequences]
    options = {"do_sample": False, "max_new_tokens": most}
    if way == WAYS[2]:
        read = pad_sequence(list(sources), batch_first=True).to(pair.device)
        kept = pad_sequence([torch.ones_like(each) for each in sources], batch_first=True).to(pair.device)
        rows = pair.target.generate(read, attention_mask=kept, **options)
    else:
        rows = [_assisted(pair, each, draft_length, options) for each in sources]
    return [_ended(row[1:].tolist(), pair.target.generation_config.eos_token_id) for row in rows]


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence transformers' warnings about its own assistant calls and about missing optional kernels."""
    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)


def _assisted(pair: ModelPair, source: Tensor, draft_length: int, options: dict) -> Tensor:
    read = source[None].to(pair.device)
    with _quiet(), changed([(vars(pair.draft.generation_config), "num_assistant_tokens", draft_length)]):
        rows = pair.target.generate(read, attention_mask=torch.ones_like(read), assistant_model=pair.draft, **options)
    return rows[0]


def _ended(row: list[int], eos: int) -> list[int]:
    return row[: row.index(eos) + 1] if eos in row else row


def timed(
    pair: ModelPair, sources: Sequence[str], *, batch_sizes: Sequence[int], draft_length: int, most: int, repeats: int
) -> pd.DataFrame:
    """Return per batch size and method: ms per written token (median over interleaved repeats), and the speed relative
    to assisted decoding of single sources (median of paired ratios with 95% interval). Raises AssertionError for
    different texts."""
    ids, lines = token_ids(pair, sources), []
    for batch in batch_sizes:
        for repeat in range(repeats + 1):
            texts = {}
            for way in WAYS:
                with Elapsed(pair.device) as elapsed:
                    texts[way] = written(pair, way, ids[:batch], draft_length, most)
                tokens = sum(map(len, texts[way]))
                lines.append({"batch": batch, "way": way, "repeat": repeat, "ms": 1e3 * elapsed.seconds / tokens})
            same = all(each == texts[WAYS[0]] for each in texts.values())
            assert same or not is_exact(pair), "the methods write different texts"
    runs = pd.DataFrame(lines).query("repeat > 0")
    table = []
    for batch, part in runs.groupby("batch"):
        slowest = part[part.way == WAYS[-1]].ms.to_numpy()
        for way in WAYS:
            own = part[part.way == way].ms
            speed = Ratio.of(own, slowest)
            table.append({"batch": batch, "way": way, "ms per token": own.median(), **speed._asdict()})
    return pd.DataFrame(table).rename(columns={"median": "speed"}).set_index(["batch", "way"])


def stateful_model() -> Qwen3NextForCausalLM:
    """Return a tiny hybrid in float64 with random weights: two layers with a recurrent state, each before attention."""
    torch.manual_seed(0)
    config = Qwen3NextConfig(
        vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=256, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        layer_types=["linear_attention", "full_attention"] * 2, linear_num_key_heads=2, linear_num_value_heads=2,
        linear_key_head_dim=16, linear_value_head_dim=16, mlp_only_layers=[0, 1, 2, 3],
    )  # fmt: skip
    model = Qwen3NextForCausalLM(config).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(8)
    return model


def read_from_the_last_state(self: RowState, tokens: Tokens, current: Pass, replay: Callable, read: Callable) -> Any:
    """The bug, in place of `RowState.read`: the state after all submitted tokens stays, rejected tokens included."""
    rows = slice(current.batch_slots.start, current.batch_slots.stop)
    output, state = read(None if self.state is None else self.state[rows])
    self._put(rows, state, torch.tensor(current.kv_lengths), {})
    return output


@contextmanager
def not_rolled_back() -> Iterator[None]:
    """Keep the state of rejected tokens inside this context."""
    right = RowState.read
    RowState.read = read_from_the_last_state
    try:
        yield
    finally:
        RowState.read = right


def state_memory(draft_length: int = 7, rows: int = 8) -> pd.DataFrame:
    """Return GiB of recurrent states for published models: a state after each submitted token, and this library's
    method.

    A state per submitted token: (K + 1) states. This library: a state, and K + 1 inputs of convolution and recurrence.
    """
    models = {  # layers with a state; numbers in a state (float32), in a convolution window, in the inputs of a token
        "Qwen3-Next-80B": (36, 32 * 128 * 128, 3 * 8192, 8192 + 8192 + 2 * 32),
        "Nemotron-H-8B": (24, 128 * 64 * 128, 3 * 10240, 10240 + 10240 + 128),
    }
    lines, tokens = {}, draft_length + 1
    for name, (layers, state, window, token) in models.items():
        each = tokens * (4 * state + 2 * window)
        once = 4 * state + 2 * window + 2 * tokens * token
        lines[name] = {"a state per token": each, "a state and inputs": once}
        lines[name] = {method: layers * rows * size / 2**30 for method, size in lines[name].items()}
    table = pd.DataFrame.from_dict(lines, orient="index")
    return table.assign(ratio=table.iloc[:, 0] / table.iloc[:, 1])


def clamped(generation: Generation, sizes: Sequence[int] = (2, 4, 8, 16)) -> pd.DataFrame:
    """Return tokens per row and step, by batch size: with each row's own accepted length, and if every row kept only as
    many draft tokens as the row with the fewest. Uses the first rows of each decode step with enough rows."""
    steps = generation.trace.steps.query("kind == 'decode'")
    order = steps.groupby("step").cumcount()
    count = steps.groupby("step").row.transform("size")
    lines = {}
    for size in sizes:
        chosen = steps[(order < size) & (count >= size)]
        if len(chosen):
            least = chosen.groupby("step").accepted.min().mean() + 1
            lines[size] = [chosen.accepted.mean() + 1, least]
    columns = ["own lengths", "least accepted"]
    table = pd.DataFrame.from_dict(lines, orient="index", columns=columns).rename_axis("batch size")
    return table.assign(ratio=table["own lengths"] / table["least accepted"])


def rolled_back(model: Qwen3NextForCausalLM, prompt: Tensor, new: int, draft_length: int) -> pd.DataFrame:
    """Return per method: greedy text of one row, right tokens before the first wrong token, rejected draft tokens."""
    draft = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter.mul_(0.95)
    pair = ModelPair(model, draft)
    with _quiet():
        expected = plain_decoding.greedy(model, prompt, new)[0].tolist()
    lines = {"transformers.generate": {"text": expected, "right tokens": new, "rejected": 0}}
    options = {"max_new_tokens": new, "draft_length": draft_length, "eos_token_id": ()}
    with Session(pair):  # probes the unpatched model
        pass
    for name, way in (("one state and inputs", None), ("as it was left", not_rolled_back)):
        with way() if way else changed([]):
            out = generate(pair, [prompt], **options)
        text = out.sequences[0].tolist()
        agreeing = next((at for at, (a, b) in enumerate(zip(text, expected, strict=True)) if a != b), new)
        rejected = int((out.trace.steps.drafted - out.trace.steps.accepted).sum())
        lines[name] = {"text": text, "right tokens": agreeing, "rejected": rejected}
    return pd.DataFrame.from_dict(lines, orient="index")
