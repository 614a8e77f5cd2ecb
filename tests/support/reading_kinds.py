"""Every encoder-decoder type of transformers for text, in a tiny configuration (see module `kinds`)."""

from dataclasses import replace

import models_page
import torch
from kinds import NEW, TOKENS, Finding, cells, counts, decoded, said, shrunk
from tiny import ragged_prompts
from torch import Tensor
from transformers import AutoModelForSeq2SeqLM, GenerationConfig, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING
from trial_policies import PerRow

from bass_lab.drafters import LayerSkipDrafter

SOURCES = ragged_prompts(5, 9, 12, 17, 3, 41)
COLUMNS = ("kind", "outcome", "path", "reason")


def kinds() -> dict[str, type[PreTrainedConfig]]:
    theirs = (kind for kind in MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING if kind.__module__.startswith("transformers."))
    return {kind.model_type: kind for kind in theirs if kind().is_encoder_decoder}


def tiny(kind: str, noise: float = 0.0) -> PreTrainedModel:
    """Return a tiny random model in float64. noise > 0: the same model with disturbed weights, as a draft."""
    torch.manual_seed(0)
    config = shrunk(kinds()[kind], {"is_decoder": False})
    model = AutoModelForSeq2SeqLM.from_config(config, dtype=torch.float64).eval()
    with torch.no_grad():
        for parameter in filter(torch.is_floating_point, model.parameters()):
            if parameter.ndim > 1:  # sources matter, and argmaxes vary
                parameter.mul_(0.3 / parameter.std().clamp(min=1e-6))
                parameter.add_(torch.randn_like(parameter), alpha=noise * 0.3)
            else:
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
    model.generation_config = GenerationConfig(decoder_start_token_id=TOKENS["decoder_start_token_id"], pad_token_id=0)
    return model


def alone(model: PreTrainedModel, source: Tensor) -> list[int]:
    ids = source[None]
    return model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=NEW)[0, 1:].tolist()


def find(kind: str) -> Finding:
    """Decode sources in one batch with drafts of four tokens, per row and without drafts. Compare with single rows."""
    try:
        target, draft = tiny(kind), tiny(kind, noise=0.1)
        expected = [alone(target, source) for source in SOURCES]
    except Exception as error:  # any error of a foreign architecture is the outcome
        return Finding(kind, "not tiny", reason=said(error))
    ways = ((draft, 4), (LayerSkipDrafter(1), PerRow(3)), (None, 0))
    found, finding = decoded(kind, target, ways, SOURCES)
    if all(texts == expected for texts in found.values()):
        return finding
    return replace(finding, outcome="wrong")


def page(findings: list[Finding]) -> str:
    return f"{counts(findings)}\n\n{models_page.table(COLUMNS, [cells(finding, COLUMNS) for finding in findings])}"
