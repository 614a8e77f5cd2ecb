"""Lines of `make bench-gpu`: what each holds, and the table that people read."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from bass_core import inputs

FIELDS: inputs.Kinds = {
    "shape": str,
    "method": str,  # transformers, regular, single, batched
    "policy": str,  # "k=5", a policy's name, or "" where nothing is drafted
    "alpha": (float, type(None)),  # forced; null where nothing is drafted
    "batch": int,
    "attention": str,
    "compile": str,
    "context": int,  # mean tokens of a prompt
    "max_new_tokens": int,
    "repeats": int,
    "seconds": list,  # of decoding, prefill left out, one per repeat
    "first_ms": float,  # per token of a row; see timed_runs.Clock.latencies
    "mean_ms": float,
    "last_ms": float,
    "tokens_per_second": float,
    "tokens_per_step": (float, type(None)),
    "k": (float, type(None)),  # mean planned draft length
    "over_regular": dict,  # median, low, high of the paired ratios
    "utilisation": (dict, type(None)),  # verified, emitted, draft, bandwidth: shares of the measured peaks
    "host_share": (float, type(None)),  # of the decode time, in which the device works on no pass
    "copy_gb_per_s": float,
    "matrix_tflops": float,
    "dtype": str,
    "disturbed": int,  # repeats in which something was compiled or recorded for the first time
    "exactness": dict,  # of the embedded pair: passed, checks, attention, compile
    "synthetic": bool,
    "device": str,
    "torch": str,
    "transformers": str,
    "commit": str,
}


def check(line: dict) -> None:
    """Raises ValueError naming the field of a record that is missing or of the wrong type."""
    inputs.check_fields(line, FIELDS, ("batch", "repeats", "mean_ms", "tokens_per_second"))


def table(lines: Sequence[dict]) -> str:
    """The records of one group as text."""
    shown = []
    for line in lines:
        ratio, used = line["over_regular"], line["utilisation"] or {}
        shown.append(
            {
                "way": " ".join(filter(None, (line["method"], line["policy"]))),
                "α": "" if line["alpha"] is None else f"{line['alpha']:g}",
                "attention": line["attention"],
                "compile": line["compile"],
                "ms/token": f"{line['mean_ms']:.2f}",
                "first-last": f"{line['first_ms']:.2f}-{line['last_ms']:.2f}",
                "tokens/s": f"{line['tokens_per_second']:.0f}",
                "over regular": f"{ratio['median']:.2f}× ({ratio['low']:.2f}-{ratio['high']:.2f})",
                "tokens/step": "" if line["tokens_per_step"] is None else f"{line['tokens_per_step']:.2f}",
                "of bandwidth": f"{used['bandwidth']:.0%}" if used else "",
                "verified": f"{used['verified']:.1%}" if used else "",
                "emitted": f"{used['emitted']:.1%}" if used else "",
                "host": "" if line["host_share"] is None else f"{line['host_share']:.1%}",
            }
        )
    first = lines[0]
    heading = (
        f"{first['shape']}, batch {first['batch']}, {first['context']} tokens of context; synthetic: dummy weights"
    )
    return f"{heading}\n{pd.DataFrame(shown).to_string(index=False)}\n"
