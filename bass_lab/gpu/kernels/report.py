"""Outcomes as JSON lines, as a table, and as a summary relative to the targets."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable

from bass_lab.gpu.kernels.cases import Case
from bass_lab.gpu.kernels.measure import KernelOutcome
from bass_lab.gpu.kernels.peers import OURS
from bass_lab.measure import records

SHAPE = ("heads", "kv_heads", "head_dim")  # of a `StepWork`
CASE = ("model", "batch", "query_length", "kv_length", "distribution", "dtype")  # of a `Case`
LARGE_GB = 64e-3  # smallest read with a bandwidth target
TARGETS = {1: 80.0, 4: 75.0}  # percent of the copy bandwidth, from this query length on


def of_case(case: Case) -> dict:
    """Return the fields of a line that identify its case."""
    return {name: getattr(case, name) for name in CASE}


def line(case: Case, outcome: KernelOutcome, copy: float, clock: str, seed: int, environment: dict) -> dict:
    """Return the record of a kernel. copy: bytes per second. clock: type of the device that was timed."""
    gb = case.kv_bytes(seed) / 1e9
    found = {"schema": "kernel", "kernel": outcome.kernel}
    found |= of_case(case) | {name: getattr(case.work, name) for name in SHAPE}
    found |= {"total_kv": sum(case.lengths(seed)), "gb": gb, "seed": seed, "clock": clock, "copy_gb_per_s": copy / 1e9}
    return found | outcome.fields(gb, copy, case.work.layers) | environment


def best_peer(lines: list[dict]) -> dict | None:
    """Return the fastest line of a peer."""
    timed = [line for line in lines if line["us"] is not None and line["kernel"] not in OURS]
    return min(timed, key=lambda line: line["us"], default=None)


def table(heading: str, lines: list[dict], **columns: Callable[[float], float | None]) -> str:
    """Return a case as a text table. columns: additional columns as functions of a line's µs."""
    rows = []
    for line in lines:
        us, plan = line["us"], records.text(line.get("us_plan_share"), ".2f")
        notes = [line["reason"], "not captured" if line["captured"] is False else "", plan and f"plan share {plan} µs"]
        rows.append(
            {
                "kernel": line["kernel"],
                "µs": records.text(us, ".1f"),
                "GB/s": records.text(us and line["gb"] / us * 1e6, ".0f"),
                "% copy": records.text(line["percent_of_copy"], ".1f"),
                **{name: records.text(us and ratio(us), ".2f") for name, ratio in columns.items()},
                "error": records.text(us and line["error"], ".1e"),
                "": ", ".join(filter(None, notes))[:110].ljust(110),
            }
        )
    return records.text_table(f"\n{heading}", rows)


def attention_table(case: Case, lines: list[dict]) -> str:
    """Return a case of attention as a text table, fastest first."""
    gb = lines[0]["gb"]
    floor = gb / lines[0]["copy_gb_per_s"] * 1e6
    heading = f"{case}: {1000 * gb:.1f} MB, floor {floor:.1f} µs at the copy's bandwidth"
    fastest = sorted(lines, key=lambda line: (line["us"] is None, line["us"] or 0.0))
    best = best_peer(lines)
    return table(heading, fastest, **{"÷ peer": lambda us: best and us / best["us"]})


def summary(lines: list[dict]) -> dict:
    """Return the figures of `ragged` relative to the targets, and the kernels that were wrong or did not run."""
    by_case = defaultdict(list)
    for line in lines:
        by_case[_shape(line)].append(line)
    shares, slower = defaultdict(list), []
    for shape, group in by_case.items():
        ours = next((line for line in group if line["kernel"] == "ragged" and line["us"] is not None), None)
        if ours is None:
            continue
        if ours["gb"] >= LARGE_GB:
            shares[ours["query_length"]].append(round(ours["percent_of_copy"], 1))
        best = best_peer(group)
        if best and ours["us"] > best["us"]:
            slower.append([shape, best["kernel"], round(ours["us"] / best["us"], 3)])
    return {
        "cases": len(by_case),
        "timed": sum(line["us"] is not None for line in lines),
        "ragged_percent_of_copy_from_64_mb": {
            query_length: {
                "cases": len(found),
                "lowest": min(found),
                "median": sorted(found)[len(found) // 2],
                "target": TARGETS[max(q for q in TARGETS if q <= query_length)],
            }
            for query_length, found in sorted(shares.items())
        },
        "ragged_slower_than_a_peer": sorted(slower, key=lambda entry: -entry[2]),
        "wrong": [[line["kernel"], _shape(line)] for line in lines if (line["reason"] or "").startswith("wrong")],
        "not_captured": dict(Counter(line["kernel"] for line in lines if line["captured"] is False)),
        "not_run": dict(Counter(f"{line['kernel']}: {_brief(line['reason'])}" for line in lines if line["reason"])),
    }


def _shape(line: dict) -> str:
    return f"{line['model']} B{line['batch']} Q{line['query_length']} L{line['kv_length']} {line['distribution']}"


def _brief(reason: str) -> str:
    """Return the first sentence, so that reasons with different numbers count as one."""
    return reason.split(". ")[0][:80]
