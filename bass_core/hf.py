"""`bass_generate`: the engine behind `transformers`' own `generate`.

    model.generate(**inputs, custom_generate=bass_generate, draft_model=draft, do_sample=True, num_return_sequences=8)

transformers prepares everything as for its own decoding and calls us in place of its loop. What it prepared is either
honoured or refused by name: nothing that would change the text is dropped in silence. Four arguments of `generate`
never reach a callable (transformers 5.17 to 5.24). Two are looked up where they stand, in `generate`'s frame:

* `assistant_model` is the draft model, for a single sequence: `generate` itself refuses it with more. Where neither it
  nor `draft_model` is given, the call is refused: drafts come from somewhere that the caller chose.
* `streamer` hears tokens as they are committed, of a single sequence as ever, and of the end, also after an error.
* `tokenizer` is gone, so `generate` raises for `stop_strings` whether it was passed or not. Use
  `bass_core.generate(..., stop=...)`.
* `assistant_tokenizer` is gone: draft and target must share a vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
import transformers
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation import BaseStreamer, GenerateDecoderOnlyOutput

from bass_core.drafters import NAMES, Drafter, named
from bass_core.generation import Generation, generate
from bass_core.loading.model_pair import ModelPair
from bass_core.loop.trace import StepEvent
from bass_core.model import transformers_internals as internals
from bass_core.model.encoder_decoder import FEATURES
from bass_core.options import among, asked_for
from bass_core.policies.protocol import DraftLengthPolicy
from bass_core.prompts import BEGINS

# Fields of a GenerationConfig that are honoured, or say nothing about decoding.
HONOURED = {
    "max_length", "max_new_tokens", "min_length", "min_new_tokens", "max_time", "do_sample", "num_return_sequences",
    "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "eos_token_id", "pad_token_id", "bos_token_id",
    "return_dict_in_generate", "transformers_version", "suppress_tokens", "begin_suppress_tokens",
}  # fmt: skip
# Fields that change no text: caches, compilation, other systems' drafts, and beams where there are none.
NEUTRAL = {
    "assistant_confidence_threshold", "assistant_lookbehind", "cache_config", "cache_implementation", "compile_config",
    "continuous_batching_config", "disable_compile", "early_stopping", "is_assistant", "length_penalty", "low_memory",
    "max_cache_len", "max_matching_ngram_size", "num_assistant_tokens", "num_assistant_tokens_schedule",
    "prefill_chunk_size", "target_lookbehind", "use_cache",
}  # fmt: skip
HONOURED_OF_READERS = {"decoder_start_token_id", "forced_bos_token_id", "forced_eos_token_id"}
# Their processors: the option each is made from, and the attribute that holds its value.
PROCESSORS = {
    transformers.RepetitionPenaltyLogitsProcessor: ("repetition_penalty", "penalty"),
    transformers.TemperatureLogitsWarper: ("temperature", "temperature"),
    transformers.TopKLogitsWarper: ("top_k", "top_k"),
    transformers.TopPLogitsWarper: ("top_p", "top_p"),
    transformers.MinPLogitsWarper: ("min_p", "min_p"),
    transformers.ForcedBOSTokenLogitsProcessor: ("forced_bos_token_id", "bos_token_id"),
    transformers.ForcedEOSTokenLogitsProcessor: ("forced_eos_token_id", "eos_token_id"),
    transformers.SuppressTokensLogitsProcessor: ("suppress_tokens", "suppress_tokens"),
    transformers.SuppressTokensAtBeginLogitsProcessor: ("begin_suppress_tokens", "begin_suppress_tokens"),
    transformers.NoBadWordsLogitsProcessor: ("bad_words_ids", "bad_word_ids"),
}
CRITERIA = (transformers.MaxLengthCriteria, transformers.MaxTimeCriteria, transformers.EosTokenCriteria)
INSTEAD = {
    "num_beams": "beam search has no speculative form; sample with do_sample=True, num_return_sequences=…",
    "use_mtp": "pass draft_model=…",
    "prompt_lookup_num_tokens": "pass draft_model=NgramDrafter()",
    "assistant_early_exit": "pass draft_model=…",
    "output_scores": "return_dict_in_generate=True brings the tokens' log-probabilities in `generation.logprobs`",
    "output_logits": "return_dict_in_generate=True brings the tokens' log-probabilities in `generation.logprobs`",
    "forced_eos_token_id": "give one id, or do_sample=False",
    "encoder_outputs": "pass the sources (input_ids or input_features), of which a draft has its own encoding",
    internals.CACHE: "the engine brings its own cache; pass the whole text as input_ids",
    "inputs_embeds": "pass token ids (input_ids)",
    "streamer": "it shows one sequence; pass on_step=…, which is called with the tokens of every row",
    "trace": "it is returned with return_dict_in_generate=True",
}
HEARD = "models that hear have a `generate` of their own, segment by segment; call bass_core.generate(pair, features)"


@dataclass
class BassOutput(GenerateDecoderOnlyOutput):
    """What `generate` returns with return_dict_in_generate=True: `sequences`, and our `generation`.

    generation: log-probabilities, reasons for ending and the trace; its sequences are without prompt and padding.
    """

    generation: Generation | None = None


def bass_generate(
    model: PreTrainedModel,
    input_ids: Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    *,
    draft_model: PreTrainedModel | Drafter | str | None = None,
    draft_length: int | DraftLengthPolicy | None = None,
    verification: str = "token",
    attention: str = "auto",
    compile: str = "auto",
    max_batch_size: int | None = None,
    seed: int | None = None,
    on_step: Callable[[StepEvent], None] | None = None,
    trace: str = "off",
    inputs_tensor: Tensor | None = None,
    **model_kwargs,
) -> Tensor | BassOutput:
    """For `model.generate(..., custom_generate=bass_generate)`; returns what `generate` does, by BASS.

    The named arguments are yours to pass to `model.generate`, and mean what they mean for `bass_core.generate`:
    draft_model: a smaller model of the same vocabulary, any `Drafter`, "ngram" or "suffix"; None takes
        `assistant_model`, and there has to be one.
    draft_length, verification, attention, compile, max_batch_size: as there.
    seed: None draws one from torch's global generator if tokens are sampled, so that `torch.manual_seed` governs.
    on_step: called with a StepEvent after each step; its rows are those of the output. This is how to stream several;
        for one sequence, transformers' `streamer` does.
    trace: "steps" or "tokens" need return_dict_in_generate=True, whose result holds the trace.

    Returns int64 [B * num_return_sequences, P + N] on the input's device: the prompts with their left padding, then the
    new tokens, padded on the right with pad_token_id to the longest row. Greedy text is that of `generate`, sampled
    text has the same law (with other random numbers); a prompt is prefilled once for all of its samples. Dropout is off
    also in training mode. Padding is never penalised as a repetition (transformers 5.17 counts the pad token as seen).
    max_time is checked between steps, also before the first; rows may then differ in length, and be empty. Of an
    encoder-decoder model the prompts are what its texts begin with; inputs_tensor, which `generate` hands over, is what
    they are texts of.

    Raises ValueError naming any other processor, stopping criterion, generation option or model input, for masks that
    hide anything but left padding (of sources: right padding), and where `bass_core.generate` does.
    """
    streamer, stream = internals.generate_argument("streamer"), None
    with ExitStack() as ending:
        if streamer is not None:
            ending.callback(streamer.end)
        pair = ModelPair(model, _drafts_from(draft_model))
        _refuse_other_options(generation_config, pair)
        _refuse_other_inputs(model_kwargs)
        mask, width = model_kwargs.get("attention_mask"), input_ids.shape[1]
        if pair.reads_sources:
            forced, starts = _forced_first(generation_config, input_ids), [0] * len(input_ids)
            prompts = _sources(inputs_tensor, mask, input_ids, forced)
        else:
            prompts, forced = _prompts(input_ids, mask, model_kwargs.get("position_ids")), []
            starts = [width - len(prompt) for prompt in prompts]
        _refuse_other_processors(logits_processor, generation_config, width, len(forced), starts)
        stops = _stops(stopping_criteria, width, forced)
        sampling = _sampling(generation_config)
        pad = _padding(generation_config, stops, len(input_ids))
        if trace != "off" and not generation_config.return_dict_in_generate:
            _refuse("trace", trace)
        if seed is None:
            seed = int(torch.randint(2**63 - 1, (), device="cpu")) if sampling["temperature"] else 0
        if streamer is not None:
            if len(prompts) > 1:
                _refuse("streamer", type(streamer).__name__)
            stream = _Stream(streamer, forced, generation_config.forced_eos_token_id is not None)
        hearers = [each for each in (stream and stream.stepped, on_step) if each is not None]

        def stepped(event: StepEvent) -> None:
            for hearer in hearers:
                hearer(event)

        generation = generate(
            pair,
            prompts,
            **stops,
            **sampling,
            **among(locals()) | {"generation_config": _never_chosen(generation_config)},  # all else is in the call
            on_step=stepped if hearers else None,
        )
        rows = _with_forced(generation, generation_config, forced, generation_config.max_length - width)
        if stream is not None:
            stream.send(rows[0].tolist())
    new = pad_sequence(rows, batch_first=True, padding_value=pad)
    sequences = torch.cat([input_ids.long(), new.to(input_ids.device)], dim=1)
    return BassOutput(sequences, generation=generation) if generation_config.return_dict_in_generate else sequences


def _drafts_from(draft_model: PreTrainedModel | Drafter | str | None) -> PreTrainedModel | Drafter:
    """What was chosen to draft. Raises ValueError where nothing was, or two."""
    assistant = internals.generate_argument("assistant_model")
    if draft_model is not None and assistant is not None:
        raise ValueError("give draft_model or assistant_model: both say where drafts come from")
    if draft_model is None and assistant is None:
        raise ValueError(
            "bass_generate does not guess where drafts come from: pass draft_model=small, a smaller model of the same "
            'vocabulary, or draft_model="ngram" to look them up in the text'
        )
    chosen = assistant if draft_model is None else named(draft_model) or draft_model
    if not isinstance(chosen, PreTrainedModel | Drafter):
        got = f"a {type(chosen).__name__}" if isinstance(chosen, torch.nn.Module) else repr(chosen)
        raise TypeError(f"draft_model must be a transformers model, a Drafter, {NAMES}; got {got}")
    return chosen


class _Stream:
    """Sends the tokens of the one row to a streamer as they are committed, each once."""

    def __init__(self, streamer: BaseStreamer, first: list[int], last_may_change: bool):
        """first: tokens that the row begins with. last_may_change: the newest token is held back."""
        self._streamer, self._row, self._held, self._sent = streamer, list(first), int(last_may_change), 0

    def stepped(self, event: StepEvent) -> None:
        for tokens in event.new_tokens:
            self._row += tokens
            self.send(self._row[: len(self._row) - self._held])

    def send(self, row: list[int]) -> None:
        new, self._sent = row[self._sent :], max(self._sent, len(row))
        if new:
            self._streamer.put(torch.tensor(new, device="cpu"))


def _refuse(name: str, value: Any, kind: str = "") -> NoReturn:
    instead = INSTEAD.get(name, "leave it out, or call generate without custom_generate")
    raise ValueError(f"bass_generate cannot honour {kind}{name}={str(value)[:60]}: {instead}")


def _refuse_other_options(config: GenerationConfig, pair: ModelPair) -> None:
    """Raises ValueError for a field that would change the text. Fields that transformers does not know change none."""
    if config.do_sample and isinstance(config.forced_eos_token_id, list) and len(config.forced_eos_token_id) > 1:
        _refuse("forced_eos_token_id", config.forced_eos_token_id, "the generation option ")  # `generate` draws one
    known, honoured = vars(GenerationConfig()), HONOURED | NEUTRAL
    honoured |= HONOURED_OF_READERS if pair.reads_sources else set()
    others = (name for name in vars(config) if not name.startswith("_") and name not in honoured)
    for name, value in asked_for(config, others):
        if name == "bad_words_ids" and all(len(word) == 1 for word in value):
            continue
        if name in known:
            _refuse(name, value, "the generation option ")
        if pair.target.main_input_name == FEATURES:
            raise ValueError(f"bass_generate cannot honour {name}={str(value)[:60]}: {HEARD}")


def _refuse_other_inputs(model_kwargs: dict) -> None:
    """`generate` itself adds masks, positions, an empty cache, what the encoder made and two flags; anything else came
    from the caller."""
    if (internals.generate_argument("kwargs") or {}).get("encoder_outputs") is not None:
        _refuse("encoder_outputs", "those of the caller")
    cache = model_kwargs.get(internals.CACHE)
    if internals.is_callers_cache(cache):
        _refuse(internals.CACHE, type(cache).__name__)
    mask = model_kwargs.get("decoder_attention_mask")
    if mask is not None and not mask.all():
        _refuse("decoder_attention_mask", "a mask that hides tokens")
    known = ("attention_mask", "position_ids", internals.CACHE, "use_cache", "logits_to_keep", "encoder_outputs")
    known += ("decoder_attention_mask",)
    for name, value in model_kwargs.items():
        if name not in known and value is not None:
            _refuse(name, type(value).__name__, "the model input ")


def _refuse_other_processors(
    processors: LogitsProcessorList, config: GenerationConfig, width: int, forced: int, starts: list[int]
) -> None:
    """Every processor is one that `generate` makes from an honoured option. width: the prompts', padding included.
    forced: how many tokens rows are forced to begin with. starts: where each prompt begins, behind its padding."""
    seen = set()
    for processor in processors:
        kind = type(processor)
        if kind is transformers.MinLengthLogitsProcessor and processor.min_length <= width:
            continue  # the prompts are that long already
        if kind in (transformers.MinLengthLogitsProcessor, transformers.MinNewTokensLengthLogitsProcessor):
            name = "min_length" if config.min_new_tokens is None else "min_new_tokens"
            _refuse(name, getattr(config, name), "the generation option ")
        if kind in seen or not _made_from_option(processor, config, width + forced, starts):
            constrained = kind is transformers.PrefixConstrainedLogitsProcessor
            name = "prefix_allowed_tokens_fn" if constrained else kind.__name__
            instead = f"set the option {PROCESSORS[kind][0]}" if kind in PROCESSORS else "leave it out"
            raise ValueError(
                f"bass_generate cannot honour the logits processor {name}: {instead}, or call generate without "
                f"custom_generate; honoured are the options {', '.join(option for option, _ in PROCESSORS.values())}"
            )
        seen.add(kind)


def _made_from_option(processor: LogitsProcessor, config: GenerationConfig, first: int, starts: list[int]) -> bool:
    """first: where the first token is chosen."""
    if type(processor) not in PROCESSORS:
        return False
    option, attribute = PROCESSORS[type(processor)]
    ignored = getattr(processor, "prompt_ignore_length", None)  # generate's ignores padding, or nothing
    if isinstance(ignored, int) or (ignored is not None and ignored.tolist() != starts):
        return False
    theirs, ours = getattr(processor, attribute), getattr(config, option)
    if isinstance(theirs, Tensor):
        theirs, ours = theirs.tolist(), [ours] if isinstance(ours, int) else list(ours or ())
    return theirs == ours and getattr(processor, "begin_index", first) == first


def _sampling(config: GenerationConfig) -> dict[str, float]:
    """`config`'s processing as our options; None is off, and temperature 0 is greedy."""
    off = {"repetition_penalty": 1.0}
    if config.do_sample:
        off |= {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    options = {name: none if getattr(config, name) is None else getattr(config, name) for name, none in off.items()}
    return {"temperature": 0.0} | options


def _stops(criteria: StoppingCriteriaList, width: int, forced: list[int]) -> dict[str, Any]:
    """When rows end: max_new_tokens (at least 1, as `generate` looks after each token, but those that they are forced
    to begin with are no new ones), time_budget, eos_token_id."""
    for criterion in criteria:
        if type(criterion) not in CRITERIA:
            raise ValueError(
                f"bass_generate cannot honour the stopping criterion {type(criterion).__name__}: leave it out, or call "
                "generate without custom_generate; honoured are max_new_tokens, max_length, max_time and eos_token_id"
            )

    def all_of(kind: type) -> list:
        return [criterion for criterion in criteria if type(criterion) is kind]

    lengths, times, eos_tokens = map(all_of, CRITERIA)
    ends = [criterion.initial_timestamp + criterion.max_time for criterion in times]
    eos = {each for criterion in eos_tokens for each in criterion.eos_token_id.flatten().tolist()}
    most = max(1, min(criterion.max_length for criterion in lengths) - width) - len(forced)
    return {
        "max_new_tokens": 0 if eos.intersection(forced) else most,
        "time_budget": max(0.0, min(ends) - time.time()) if ends else None,
        "eos_token_id": eos,
    }


def _never_chosen(config: GenerationConfig) -> GenerationConfig:
    """Which ids texts may not have, which the engine reads of a configuration."""
    names = ("suppress_tokens", "begin_suppress_tokens", "bad_words_ids")
    return GenerationConfig(**{name: getattr(config, name) for name in names})


def _forced_first(config: GenerationConfig, input_ids: Tensor) -> list[int]:
    """The token that texts are forced to have first; as in `generate`, texts that begin with one token alone."""
    forced = config.forced_bos_token_id
    return [] if forced is None or input_ids.shape[1] > 1 else [forced]


def _with_forced(generation: Generation, config: GenerationConfig, forced: list[int], most: int) -> list[Tensor]:
    """The rows as `generate` returns them: with the token that is forced to be first, and with the one that is forced
    to be last as token number `most`, whatever the model chose there."""
    rows = [torch.cat([row.new_tensor(forced), row]) for row in generation.sequences]
    if (last := config.forced_eos_token_id) is not None:
        for row in rows:
            if len(row) == most:
                row[-1] = last if isinstance(last, int) else min(last)  # of equal logits `argmax` takes the first
    return rows


def _sources(read: Tensor, mask: Tensor | None, input_ids: Tensor, forced: list[int]) -> list[dict[str, Tensor]]:
    """What each row of input_ids [B, P] is a text of, without padding. read: [B / n, S] or features; mask [B, S]."""
    begins = torch.cat([input_ids, input_ids.new_tensor(forced).expand(len(input_ids), -1)], 1).cpu()
    read = read.repeat_interleave(len(input_ids) // len(read), 0).cpu()
    if read.is_floating_point():
        return [{FEATURES: row, BEGINS: begin} for row, begin in zip(read, begins, strict=True)]
    if read.min() < 0:
        _refuse("encoder_outputs", "those of sources that are not given")
    kept = torch.ones_like(read, dtype=torch.bool) if mask is None else mask.cpu() != 0
    if bool((kept[:, 1:] & ~kept[:, :-1]).any()):
        raise ValueError(
            "an attention_mask of sources must have zeros on the right of each row only: generate counts positions "
            "from the padding on. Pad with tokenizer.padding_side='right'"
        )
    rows = [row[shown] for row, shown in zip(read, kept, strict=True)]
    return [{"input_ids": row, BEGINS: begin} for row, begin in zip(rows, begins, strict=True)]


def _padding(config: GenerationConfig, stops: dict, rows: int) -> int:
    """The id that fills rows which ended early; without one, rows that may do so are refused."""
    pad = internals.padding_id(config)
    if pad is not None:
        return pad
    if rows > 1 and (stops["eos_token_id"] or stops["time_budget"] is not None):
        raise ValueError("rows may end at different lengths, and there is no pad_token_id: pass one to generate")
    return 0  # all rows end at the same length


def _prompts(input_ids: Tensor, mask: Tensor | None, position_ids: Tensor | None) -> list[Tensor]:
    """The rows [P_b] without their left padding. input_ids, mask: [B, P]; equal rows will share a prefill."""
    kept = torch.ones_like(input_ids, dtype=torch.bool) if mask is None else mask != 0
    usual = kept.long().cumsum(-1) - 1
    positions = usual if position_ids is None else position_ids  # generate makes them as wide as the mask was
    if not kept.shape[1] == positions.shape[-1] == input_ids.shape[1] or bool((kept[:, :-1] & ~kept[:, 1:]).any()):
        raise ValueError(
            "attention_mask must have the shape of input_ids and zeros on the left of each row only (it is inferred "
            "from pad_token_id if not given). Pad with tokenizer.padding_side='left'"
        )
    if bool(((positions != usual) & kept).any()):
        raise ValueError("position_ids other than 0, 1, 2, … from each row's first token cannot be honoured: drop them")
    return [row[shown] for row, shown in zip(input_ids.cpu(), kept.cpu(), strict=True)]
