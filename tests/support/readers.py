"""Tiny encoder-decoder models, random and by table, and what transformers says of a source alone."""

from __future__ import annotations

import functools

import torch
from tiny import CONTEXT, VOCABULARY
from torch import Tensor, nn
from transformers import (
    AutoModelForSeq2SeqLM,
    AutoModelForSpeechSeq2Seq,
    GenerationConfig,
    GenerationMixin,
    PreTrainedModel,
    WhisperConfig,
)
from transformers.cache_utils import EncoderDecoderCache
from transformers.modeling_outputs import BaseModelOutput, CausalLMOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.auto.configuration_auto import AutoConfig

from bass_core.sources import Source
from bass_lab.checks.tabular import ENTRIES, TabularConfig, TabularModel

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
    "t5": _T5,
    "mt5": _T5,
    "umt5": _T5,
    "bart": _BART,
    "mbart": _BART,
    "marian": _BART,
    "pegasus": _BART,
    "m2m_100": _BART,
    "whisper": _BART | {"num_mel_bins": 6, "max_source_positions": 12, "max_target_positions": CONTEXT},
}
HEARS = ("whisper",)
SPREADS = {"t5": 1.0, "mt5": 1.0, "umt5": 1.0, "m2m_100": 0.6}  # of weights, so that texts vary; of the others 0.1


@functools.cache
def tiny_reader(kind: str, dtype: str = "float32", noise: float = 0.0) -> PreTrainedModel:
    """A tiny encoder-decoder model whose argmaxes vary with the source. noise: weights disturbed, as a draft has."""
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
    """Random sources of these lengths (what is heard has one length)."""
    generator = torch.Generator().manual_seed(0)
    if kind in HEARS:
        return [torch.randn(6, 24, generator=generator, dtype=torch.float64) for _ in lengths]
    return [torch.randint(3, VOCABULARY, (length,), generator=generator) for length in lengths]


def given(model: PreTrainedModel, source: Tensor) -> dict[str, Tensor]:
    """What transformers is given of one source."""
    if model.main_input_name != "input_ids":
        return {model.main_input_name: source[None].to(model.dtype)}
    return {"input_ids": source[None], "attention_mask": torch.ones_like(source)[None]}


def alone(model: PreTrainedModel, source: Tensor, new: int, **options) -> list[int]:
    """What transformers' own `generate` writes of one source, greedily, without the start token. (Whisper's class has a
    `generate` that does more; this is that of all models.)"""
    out = GenerationMixin.generate(model, **given(model, source), max_new_tokens=new, do_sample=False, **options)
    return out[0, 1:].tolist()


# --- a model that is a table ------------------------------------------------------------------------------


class _Encoder(nn.Module):
    """A source as a number per token, which tells its place."""

    def __init__(self, base: int):
        super().__init__()
        self.base = base

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, **options) -> BaseModelOutput:
        places = torch.arange(input_ids.shape[1])
        return BaseModelOutput(last_hidden_state=((input_ids + 1) * self.base**places).double()[..., None])


class _Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Identity()])


class TabularReader(TabularModel):
    """Its logits are looked up under a code of the source and the text so far, both read by uniform attention: another
    row's source, a slot behind a source's end or a wrong prefix is another code."""

    def __init__(self, config: TabularConfig):
        super().__init__(config)
        self.encoder, self.decoder = _Encoder(config.vocab_size + 1), _Decoder()

    def get_encoder(self):
        return self.encoder

    def get_decoder(self):
        return self.decoder

    def forward(
        self,
        input_ids=None,
        attention_mask=None,
        decoder_input_ids=None,
        decoder_attention_mask=None,
        decoder_position_ids=None,
        encoder_outputs=None,
        cache=None,
        use_cache=True,
        past_key_values=None,
    ):
        cache = past_key_values if cache is None else cache  # transformers before 5.24
        base, length = self.config.vocab_size + 1, decoder_input_ids.shape[1]
        if encoder_outputs is None:
            encoder_outputs = self.encoder(input_ids)
        positions = decoder_position_ids
        if positions is None:
            positions = torch.arange(length).expand_as(decoder_input_ids)
        read = encoder_outputs.last_hidden_state[:, None]  # [B, 1, S, 1]
        values = ((decoder_input_ids + 1) * base**positions).double()[:, None, :, None]  # [B, 1, Q, 1]
        if not isinstance(cache, EncoderDecoderCache):
            codes, of_source = values.cumsum(2)[:, 0, :, 0], read.mean(2)[:, 0]
        else:
            attend = ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation]

            def uniform(keys, values):
                queries = torch.zeros_like(keys[:, :, :1]).expand(-1, -1, length, -1)
                return attend(self, queries, keys, values, None, scaling=1.0)[0][:, :, 0, 0]

            codes = uniform(*cache.self_attention_cache.update(values, values, 0)) * (positions + 1)
            crossing = cache.cross_attention_cache
            if cache.is_updated[0]:
                of_source = uniform(crossing.layers[0].keys, crossing.layers[0].values)
            else:
                of_source = uniform(*crossing.update(read, read, 0))
        entry = codes.round().long() + 7 * (of_source * 60).round().long()  # of up to six tokens, 60 means are whole
        return CausalLMOutputWithPast(logits=self.table[entry % ENTRIES])


@functools.cache
def tabular_reader(vocabulary: int, seed: int) -> TabularReader:
    config = TabularConfig(vocab_size=vocabulary, seed=seed, is_encoder_decoder=True, decoder_start_token_id=START)
    config.hidden_size = 1
    return TabularReader(config).eval()


def source(*ids: int) -> Source:
    return Source(torch.tensor(ids))
