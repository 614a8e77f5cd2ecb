import functools

import torch
from tiny import CONTEXT, VOCABULARY
from torch import Tensor
from transformers import (
    AutoModelForSeq2SeqLM,
    AutoModelForSpeechSeq2Seq,
    GenerationConfig,
    GenerationMixin,
    PreTrainedModel,
    WhisperConfig,
)
from transformers.models.auto.configuration_auto import AutoConfig

START = 0
_COMMON = {
    "vocab_size": VOCABULARY, "pad_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": START,
    "tie_word_embeddings": False,
}  # fmt: skip
_T5 = _COMMON | {
    "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 4,
    "relative_attention_num_buckets": 8, "relative_attention_max_distance": 12,
}  # fmt: skip
_BART = _COMMON | {
    "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "max_position_embeddings": CONTEXT, "bos_token_id": 1,
}  # fmt: skip
OPTIONS = {
    **dict.fromkeys(("t5", "mt5", "umt5"), _T5),
    **dict.fromkeys(("bart", "mbart", "marian", "pegasus", "m2m_100"), _BART),
    "whisper": _BART | {"num_mel_bins": 6, "max_source_positions": 12, "max_target_positions": CONTEXT},
}
HEARS = ("whisper",)
SPREADS = {"t5": 1.0, "mt5": 1.0, "umt5": 1.0, "m2m_100": 0.6}  # weight scales, so that texts vary; other models 0.1


@functools.cache
def tiny_reader(kind: str, dtype: str = "float32", noise: float = 0.0) -> PreTrainedModel:
    """Return a tiny encoder-decoder model with varying argmaxes. noise: disturb the weights, for a draft."""
    torch.manual_seed(0)
    config = WhisperConfig(**OPTIONS[kind]) if kind in HEARS else AutoConfig.for_model(kind, **OPTIONS[kind])
    auto = AutoModelForSpeechSeq2Seq if kind in HEARS else AutoModelForSeq2SeqLM
    model, spread = auto.from_config(config, dtype=torch.float64).eval(), SPREADS.get(kind, 0.1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(spread / parameter.std())
                parameter.add_(torch.randn_like(parameter), alpha=noise * spread)
    model.generation_config = GenerationConfig(decoder_start_token_id=START, pad_token_id=0, eos_token_id=None)
    return model.to(getattr(torch, dtype))


def sources(kind: str, *lengths: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    if kind in HEARS:
        return [torch.randn(6, 24, generator=generator, dtype=torch.float64) for _ in lengths]
    return [torch.randint(3, VOCABULARY, (length,), generator=generator) for length in lengths]


def given(model: PreTrainedModel, source: Tensor) -> dict[str, Tensor]:
    if model.main_input_name != "input_ids":
        return {model.main_input_name: source[None].to(model.dtype)}
    return {"input_ids": source[None], "attention_mask": torch.ones_like(source)[None]}


def alone(model: PreTrainedModel, source: Tensor, new: int, **options) -> list[int]:
    """Return transformers' greedy text of a source, without the start token. Uses `GenerationMixin.generate`, because
    Whisper overrides `generate`."""
    out = GenerationMixin.generate(model, **given(model, source), max_new_tokens=new, do_sample=False, **options)
    return out[0, 1:].tolist()
