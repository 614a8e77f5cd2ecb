"""Make tiny models of every architecture. The random weights are large enough that argmaxes vary."""

import copy
import functools
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest
import tokenizers
import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedModel, PreTrainedTokenizerFast

from bass_core.drafters import FeatureHead, FeatureHeadConfig
from bass_core.loading.checkpoints import attention_of
from bass_core.model.forward_pass import current_pass

VOCABULARY = 97
CONTEXT = 96
BYTES = 3 + 256  # vocabulary of `byte_tokenizer`
WINDOW = 8  # shorter than the tests' prompts

_COMMON = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_COMMON["tie_word_embeddings"] = False
_SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": CONTEXT}
_LLAMA_LIKE = _COMMON | _SMALL | {"intermediate_size": 48, "num_key_value_heads": 2}
_GPT_LIKE = _COMMON | {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": CONTEXT}

_GEMMA = _LLAMA_LIKE | {"head_dim": 16, "sliding_window": WINDOW, "query_pre_attn_scalar": 16}
_LATENT = {  # keys wider than values
    "num_key_value_heads": 4, "moe_intermediate_size": 16, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "q_lora_rank": 16, "kv_lora_rank": 16,
    "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16,
}  # fmt: skip
_OPTIONS = {  # architecture: model type and options
    **{name: (name, _LLAMA_LIKE) for name in ("llama", "qwen2", "phi3", "olmo2", "gpt_neox")},
    "qwen3": ("qwen3", _LLAMA_LIKE | {"head_dim": 16}),
    "mistral": ("mistral", _LLAMA_LIKE | {"sliding_window": WINDOW}),
    "gemma2": ("gemma2", _GEMMA),
    "gemma3": ("gemma3_text", _GEMMA | {"layer_types": ["sliding_attention", "full_attention"]}),
    "mixtral": ("mixtral", _LLAMA_LIKE | {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "gpt2": ("gpt2", _GPT_LIKE),
    "opt": ("opt", _COMMON | _SMALL | {"ffn_dim": 48, "word_embed_proj_dim": 32}),
    "starcoder2": ("starcoder2", _LLAMA_LIKE | {"sliding_window": None}),
    "doge": ("doge", _LLAMA_LIKE | {"keep_window_size": WINDOW}),
    "mpt": ("mpt", {"vocab_size": VOCABULARY, "d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": CONTEXT}),
    "ministral3": ("ministral3", _LLAMA_LIKE | {"head_dim": 8}),
    "llama4": (
        "llama4_text",
        _LLAMA_LIKE | {"head_dim": 8, "no_rope_layers": [1, 0], "intermediate_size_mlp": 48, "num_local_experts": 2},
    ),
    "gpt_neo": (
        "gpt_neo",
        _COMMON
        | {"hidden_size": 32, "num_layers": 2, "num_heads": 4, "max_position_embeddings": CONTEXT}
        | {"attention_types": [[["global", "local"], 1]]},
    ),
    **{name: (name, _GPT_LIKE | {"rotary_dim": 4}) for name in ("codegen", "gptj")},
    "falcon": ("falcon", _COMMON | _SMALL | {"alibi": False, "new_decoder_architecture": False, "multi_query": True}),
    "deepseek_v3": ("deepseek_v3", _LLAMA_LIKE | _LATENT),
    "bloom": ("bloom", _COMMON | {"hidden_size": 32, "n_layer": 2, "n_head": 4}),
    "rwkv": ("rwkv", _COMMON | {"hidden_size": 32, "num_hidden_layers": 2, "context_length": CONTEXT}),
}

REFUSED = ("bloom", "rwkv", "llama4", "gpt_neo", "doge")
SUPPORTED = [name for name in _OPTIONS if name not in (*REFUSED, "mpt")]  # MPT: only on the path "eager"


@functools.cache
def tiny_model(
    architecture: str = "llama", seed: int = 0, dtype: str = "float32", noise: float = 0.0, **changes
) -> PreTrainedModel:
    """Return a tiny random model in evaluation mode. The same arguments give the same object.

    noise > 0: the model of that seed with disturbed weights, as a draft.
    """
    model_type, options = _OPTIONS[architecture]
    torch.manual_seed(seed)
    config = AutoConfig.for_model(model_type, **(options | changes))
    config._experts_implementation = "eager"  # the grouped kernel has no float64
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float64, **attention_of(config)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:  # the default scale (0.02) would repeat one token
                parameter.mul_(10)
                parameter.add_(torch.randn_like(parameter), alpha=noise * parameter.std().item())
    return model.to(getattr(torch, dtype))


def with_adapter(config=None):
    peft = pytest.importorskip("peft")  # here: a GPU machine may lack peft
    torch.manual_seed(1)
    lora = peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    return peft.get_peft_model(copy.deepcopy(tiny_model(vocab_size=BYTES)), config or lora).eval()


@functools.cache
def feature_head(target: PreTrainedModel, seed: int = 0, layers: int = 1) -> FeatureHead:
    torch.manual_seed(seed)
    config, width = target.config.get_text_config(), target.get_input_embeddings().embedding_dim
    head = FeatureHeadConfig(
        hidden_size=width, intermediate_size=2 * width, num_hidden_layers=layers, num_attention_heads=2,
        vocab_size=config.vocab_size, max_position_embeddings=CONTEXT, initializer_range=0.3, pad_token_id=None,
    )  # fmt: skip
    return FeatureHead(head).to(target.dtype).eval()


def ragged_prompts(*lengths: int, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, VOCABULARY, (length,), generator=generator) for length in lengths]


def greedy_alone(
    model: PreTrainedModel, prompt: torch.Tensor, new: int, eos: int | None = None, **options
) -> torch.Tensor:
    """Return the new ids of transformers' greedy decoding of one prompt."""
    config = GenerationConfig(max_new_tokens=new, do_sample=False, eos_token_id=eos, pad_token_id=0, **options)
    before, model.generation_config = model.generation_config, GenerationConfig()  # or its own EOS would fill in
    try:
        out = model.generate(prompt[None], attention_mask=torch.ones_like(prompt)[None], generation_config=config)
    finally:
        model.generation_config = before
    return out[0, len(prompt) :]


def assert_greedy(out, model: PreTrainedModel, prompts: list[torch.Tensor], new: int, **options) -> None:
    for prompt, sequence in zip(prompts, out.sequences, strict=True):
        expected = greedy_alone(model, prompt.to(model.device), new, **options)
        assert sequence.tolist() == expected.tolist()


def byte_tokenizer(swap: tuple[int, int] | None = None) -> PreTrainedTokenizerFast:
    """Return a tokenizer with a token per UTF-8 byte, after <pad>, <s> and </s>. swap: two exchanged ids."""
    tokens = ["<pad>", "<s>", "</s>", *sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())]
    if swap is not None:
        tokens[swap[0]], tokens[swap[1]] = tokens[swap[1]], tokens[swap[0]]
    bpe = tokenizers.models.BPE({token: index for index, token in enumerate(tokens)}, merges=[])
    tokenizer = tokenizers.Tokenizer(bpe)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token=None
    )


@contextmanager
def forward_passes(*models: PreTrainedModel) -> Iterator[list[tuple[int, int]]]:
    """Yield the list of [B, Q] of every forward pass of these models inside the context, packed or not."""
    shapes = []

    def note(module, args, kwargs):
        current = current_pass()  # None outside the engine's passes
        shapes.append(tuple((kwargs["input_ids"] if current is None else current.positions).shape))

    with ExitStack() as hooks:
        for model in models:
            hooks.callback(model.register_forward_pre_hook(note, with_kwargs=True).remove)
        yield shapes
