"""Options of a session, declared and checked once, before any forward pass."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

import torch
import transformers
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, PreTrainedModel, PreTrainedTokenizerBase

from bass_core import checks
from bass_core.detokenizer import StopStrings
from bass_core.exactness.processors import ForceFirst, MinTokens, Penalties, Processor, Row, as_processors, suppressing
from bass_core.exactness.sampling import SamplingParams
from bass_core.loading.model_pair import ModelPair
from bass_core.model.transformers_internals import generation_defaults
from bass_core.policies.protocol import DraftLengthPolicy

Verification: TypeAlias = Literal["token", "block", "coupled"]
Attention: TypeAlias = Literal["auto", "ragged", "pad", "split", "eager"]
Compile: TypeAlias = Literal["auto", "off", "graphs", "compiled", "compiled+graphs"]
OnRowError: TypeAlias = Literal["raise", "finish"]
TraceLevel: TypeAlias = Literal["off", "steps", "tokens"]


@dataclass(frozen=True)
class Options:
    """The options of a `Session`; see `generate`. Raises ValueError or TypeError for invalid values, and `resolved` for
    values unsupported by the pair."""

    max_batch_size: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float | None
    processors: Sequence[Processor | LogitsProcessor]
    seed: int
    draft_length: int | DraftLengthPolicy | None
    verification: Verification
    attention: Attention
    compile: Compile
    acceptance: Any
    eos_token_id: int | Iterable[int] | None
    stop: str | Sequence[str]
    generation_config: GenerationConfig | None
    on_row_error: OnRowError
    prefill_chunk: int | None
    trace: TraceLevel

    def __post_init__(self):
        for name, least in (("seed", None), ("max_batch_size", 1), ("prefill_chunk", 1)):
            if (value := getattr(self, name)) is not None or name != "prefill_chunk":
                object.__setattr__(self, name, checks.integer(name, value, least))
        kinds = {"verification": Verification, "on_row_error": OnRowError, "trace": TraceLevel, "compile": Compile}
        for name, kind in kinds.items():
            checks.one_of(name, getattr(self, name), get_args(kind))
        object.__setattr__(self, "processors", as_processors(self.processors))
        if isinstance(self.acceptance, str):
            raise TypeError(
                f"acceptance must be None or an object that draws accepted lengths, got {self.acceptance!r}; write "
                f"bass_lab.SyntheticAcceptance.named({self.acceptance!r})"
            )

    def resolved(self, pair: ModelPair) -> Resolved:
        """Return the options for a pair, including its target's `generation_config`."""
        vocabulary = pair.target.config.get_text_config().vocab_size
        config = generation_config(pair.target, self.generation_config)
        penalty = (config.repetition_penalty or 1.0) if self.repetition_penalty is None else self.repetition_penalty
        params = SamplingParams(self.temperature, self.top_k, self.top_p, self.min_p)
        check_sampling(self.generation_config, params)
        eos = eos_ids(config, self.eos_token_id, vocabulary)
        stop = stop_strings(self.stop, pair.tokenizer)
        own = processors_of(config, penalty, eos, pair) | {"processors": self.processors}
        found = Resolved(vocabulary, config, params, own, dict.fromkeys(sorted(eos), "eos"), stop)
        return found._replace(begun=found.processors(pair))


def among(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the session options among a function's `locals()`."""
    return {each.name: arguments[each.name] for each in fields(Options) if each.name in arguments}


class Resolved(NamedTuple):
    """`Options` for a pair. own: processors by option, in order. begun: the processors of a request without options of
    its own. ends: ids that end a row, and the finish reasons."""

    vocabulary: int
    config: GenerationConfig
    params: SamplingParams
    own: dict[str, Sequence[Processor]]
    ends: Mapping[int, str]
    stop: StopStrings | None
    begun: tuple[Processor, ...] = ()

    def processors(
        self,
        pair: ModelPair,
        prompt: Sequence[int] | Tensor = (),
        ends: Mapping[int, str] | None = None,
        penalty: float | None = None,
        further: Iterable[Processor | LogitsProcessor] = (),
    ) -> tuple[Processor, ...]:
        """Return the processors of a request. ends: ids that end the row. penalty: its repetition penalty. None is the
        session's. further: its own processors. Raises TypeError or ValueError for wrong processors."""
        row = Row(len(prompt), self.ends if ends is None else ends, self.vocabulary, pair.tokenizer)
        own = {} if penalty is None else {"repetition_penalty": (Penalties(penalty),)}
        every = (*itertools.chain(*(self.own | own).values()), *as_processors(further))
        found = tuple(each.begin(row) for each in every if each != Penalties())
        return self.begun if found == self.begun else found  # captured steps read the memory of the session's objects


# --- a model's generation_config ------------------------------------------------------------------

# Options of a `generation_config` with an effect on the text, but without support in the engine.
UNKNOWN_OPTIONS = (
    "num_beams", "force_words_ids", "penalty_alpha", "typical_p", "epsilon_cutoff", "eta_cutoff", "top_h",
    "guidance_scale", "stop_strings", "exponential_decay_length_penalty", "encoder_no_repeat_ngram_size",
    "encoder_repetition_penalty", "token_healing", "watermarking_config", "dola_layers", "remove_invalid_values",
    "renormalize_logits", "forced_eos_token_id",
)  # fmt: skip


# Further options and their processors, by value and EOS ids. Ids of `suppressed` have vectorized processors.
PROCESSORS: dict[str, Callable[[Any, Tensor], Processor | LogitsProcessor]] = {
    "no_repeat_ngram_size": lambda size, ends: transformers.NoRepeatNGramLogitsProcessor(size),
    "bad_words_ids": transformers.NoBadWordsLogitsProcessor,
    "sequence_bias": lambda bias, ends: transformers.SequenceBiasLogitsProcessor(bias),
    "min_length": lambda least, ends: transformers.MinLengthLogitsProcessor(least, ends),
    "min_new_tokens": lambda least, ends: MinTokens(least),
    "forced_bos_token_id": lambda token, ends: ForceFirst(token),
}
SAID_IN_THE_CALL = ("max_new_tokens", "max_length", "num_return_sequences", "max_time")


def generation_config(target: PreTrainedModel, given: GenerationConfig | None) -> GenerationConfig:
    """Return `given`, or the target's own configuration. Raises ValueError for unsupported options."""
    for name, value in asked_for(given, SAID_IN_THE_CALL) if given else ():
        raise ValueError(
            f"generation_config has {name}={value!r}, which only the call can set; pass max_new_tokens, "
            "num_return_sequences or time_budget to the call"
        )
    config = (target.generation_config if given is None else given) or GenerationConfig()
    for name, value in asked_for(config, UNKNOWN_OPTIONS):
        if name == "forced_eos_token_id" and target.config.is_encoder_decoder:
            continue  # would only mark texts that are cut off
        kept = "" if config.eos_token_id is None else f"eos_token_id={config.eos_token_id}"
        raise ValueError(
            f"the generation_config of {type(target).__name__} has {name}={value!r}, which is not supported; to decode "
            f"without this option, pass generation_config=transformers.GenerationConfig({kept})"
        )
    return config


def check_sampling(given: GenerationConfig | None, params: SamplingParams) -> None:
    """Raise ValueError if the caller's generation_config has other sampling parameters than the call."""
    if given is None or not given.do_sample:
        return
    for name in ("temperature", "top_k", "top_p", "min_p"):
        asked, ours = getattr(given, name), getattr(params, name)
        asked = 1.0 if name == "temperature" and asked is None else asked
        if asked is not None and asked != ours:
            raise ValueError(
                f"generation_config has {name}={asked} with do_sample=True, but the call has {name}={ours}; pass "
                f"{name}={asked} in the call"
            )


def suppressed(config: GenerationConfig, ends: Iterable[int], vocabulary: int) -> tuple[list[int], list[int]]:
    """Return the ids suppressed in the whole text, and the ids suppressed as the first token. ends: EOS ids, which are
    never suppressed as bad words, as in transformers."""
    bad = {word[0] for word in config.bad_words_ids or () if len(word) == 1}.difference(ends)
    never = bad.union(config.suppress_tokens or ())
    first = set(config.begin_suppress_tokens or ())
    return tuple(sorted(each for each in ids if 0 <= each < vocabulary) for ids in (never, first))


def processors_of(
    config: GenerationConfig, penalty: float, ends: Iterable[int], pair: ModelPair
) -> dict[str, Sequence[Processor]]:
    """Return the processors of a generation_config by option, in transformers' order. penalty: for repetitions."""
    asked, eos = dict(asked_for(config, PROCESSORS)), torch.tensor(sorted(ends), device=pair.device)
    if all(len(word) == 1 for word in config.bad_words_ids or ()):
        asked.pop("bad_words_ids", None)  # a vectorized processor suppresses single ids
    if "min_new_tokens" in asked:
        asked.pop("min_length", None)  # as in transformers
    found: dict[str, Sequence[Processor]] = {"sequence_bias": (), "repetition_penalty": (Penalties(penalty),)}
    found |= {name: as_processors([PROCESSORS[name](value, eos)]) for name, value in asked.items()}
    never, not_first = suppressed(config, ends, pair.target.config.get_text_config().vocab_size)
    return found | {"suppressed": [suppressing(ids, until) for ids, until in ((never, None), (not_first, 1)) if ids]}


def asked_for(config: GenerationConfig, names: Iterable[str]) -> Iterator[tuple[str, Any]]:
    """Yield names and values of the options with other values than transformers' defaults."""
    defaults = generation_defaults()
    for name in names:
        value = getattr(config, name, None)
        if value is not None and value != defaults.get(name, False):
            yield name, value


def eos_ids(
    config: GenerationConfig, eos_token_id: int | Iterable[int] | None, vocabulary: int, name: str = "eos_token_id"
) -> frozenset[int]:
    """Return the ids for the end of a row. None uses the ids of `config`; () means no ids. name: of the argument."""
    if eos_token_id is None:
        eos_token_id = () if config.eos_token_id is None else config.eos_token_id
    if isinstance(eos_token_id, Tensor):
        eos_token_id = eos_token_id.flatten().tolist()
    ids = eos_token_id if isinstance(eos_token_id, Iterable) else (eos_token_id,)
    ids = [checks.integer(name, each, least=None) for each in ids]
    for each in ids:
        if not 0 <= each < vocabulary:
            raise ValueError(f"{name} {each} is outside the target's vocabulary (0 … {vocabulary - 1})")
    return frozenset(ids)


def stop_strings(stop: str | Sequence[str], tokenizer: PreTrainedTokenizerBase | None) -> StopStrings | None:
    """Return the stop strings of an argument, or None for an empty list. A special token is matched by its id."""
    strings = (stop,) if isinstance(stop, str) else tuple(stop) if isinstance(stop, Iterable) else (stop,)
    if not all(isinstance(string, str) for string in strings):
        raise TypeError(f"stop must be a str or a list of str, got {stop!r}")
    if "" in strings:
        raise ValueError("stop contains the empty string, which would end every row at once; remove this string")
    if not strings:
        return None
    if tokenizer is None:
        raise ValueError("stop strings need a tokenizer: ModelPair(..., tokenizer=...)")

    special = set()
    for string in strings:
        hidden = _hidden_in(string, tokenizer)
        if string in hidden:
            special.add(hidden[string])
        elif hidden:
            raise ValueError(
                f"stop {string!r} contains the special token {min(hidden)!r}, which does not appear in texts; use the "
                f"special token alone"
            )
    return StopStrings(strings, tokenizer, frozenset(special))


def _hidden_in(string: str, tokenizer: PreTrainedTokenizerBase) -> dict[str, int]:
    """Return the ids of the special tokens in a string, by token. Texts do not show special tokens."""
    named = {*tokenizer.get_added_vocab(), *tokenizer.all_special_tokens}
    ids = {token: tokenizer.convert_tokens_to_ids(token) for token in named if token and token in string}
    return {token: each for token, each in ids.items() if not tokenizer.decode([each], skip_special_tokens=True)}
