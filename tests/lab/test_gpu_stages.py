"""`make gpu` rehearsed on a CPU: every stage and its files, its limit, and that it goes on where it was cut short."""

import json
import os
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import sweeps

from bass_lab import gpu_parts
from bass_lab.measure import gpu, gpu_command


def lines(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text().splitlines()]


@pytest.fixture
def sanitizer(tmp_path, monkeypatch):
    """Puts a compute-sanitizer in front of all programs that runs these lines, with what it is given in "$@"."""

    def put(script: str) -> None:
        program = tmp_path / "bin" / gpu_parts.SANITIZER[0]
        program.parent.mkdir(exist_ok=True)
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)
        monkeypatch.setenv("PATH", str(program.parent), prepend=os.pathsep)

    return put


@pytest.mark.slow
def test_a_rehearsal_writes_every_file_that_stages_name(tmp_path, capfd, sanitizer):
    sanitizer('until [ "$1" = --tool ]; do shift; done; shift 2; "$@" && echo "========= ERROR SUMMARY: 0 errors"')
    assert gpu.main([str(tmp_path), "--rehearse"]) == 0
    summaries = [json.loads(line) for line in capfd.readouterr().out.splitlines() if line.startswith('{"stage"')]
    assert [summary["stage"] for summary in summaries] == list(gpu.STAGES)
    for summary in summaries:
        assert summary["code"] == 0 and "missing" not in summary["files"].values()
    outcomes = Counter(line["outcome"] for line in lines(tmp_path / "tests.jsonl"))
    assert set(outcomes) == {"passed", "skipped"} and outcomes["passed"] > 30  # those that a CPU can rehearse
    assert not [line for file in tmp_path.glob("*.jsonl") for line in lines(file) if "failed" in line]


def test_the_gpu_tests_are_collected_without_what_draws_and_runs_notebooks(monkeypatch, tmp_path):
    """Where these are missing: `make test-oldest` has this test, too."""
    command = gpu.STAGES["tests"].command
    collect = replace(gpu.STAGES["tests"], command=lambda *given: [*command(*given), "--collect-only"])
    monkeypatch.setitem(gpu.STAGES, "tests", collect)
    assert gpu.run("tests", tmp_path, rehearse=True)["code"] == 0
    assert {"test_gpu_steps.py", "test_gpu_attention.py"} <= {Path(name).name for name in command("", "", True)}


@pytest.mark.parametrize(("seconds", "code"), [(60, None), (1, 0)], ids=["at its limit", "before"])
def test_a_stage_ends_with_all_that_it_started(monkeypatch, tmp_path, seconds, code):
    mark = tmp_path / "process"
    fork = f"child = os.fork(); child or open({str(mark)!r}, 'w').write(str(os.getpid()))"
    program = f"import os, time; {fork}; time.sleep({seconds} if child else 60)"
    stage = replace(gpu.STAGES["tests"], command=lambda folder, seconds, rehearse: ["-c", program])
    monkeypatch.setitem(gpu.STAGES, "tests", stage)
    summary = gpu.run("tests", tmp_path, seconds=5)
    assert summary["code"] == code and summary["files"] == {"tests.jsonl": "missing"}
    until, child = time.monotonic() + 10, int(mark.read_text())
    while sweeps.alive(child) and time.monotonic() < until:  # a signal takes its moment
        time.sleep(0.01)
    assert not sweeps.alive(child)


def test_a_stage_whose_packages_are_missing_is_left_out(monkeypatch, tmp_path):
    monkeypatch.setitem(gpu.STAGES, "tests", replace(gpu.STAGES["tests"], needs="no_such_package"))
    assert gpu.run("tests", tmp_path)["left_out"] == "no_such_package is not installed here"
    monkeypatch.setitem(gpu.STAGES, "tests", replace(gpu.STAGES["tests"], program="no-such-program"))
    assert gpu.run("tests", tmp_path)["left_out"] == "no-such-program is not installed here"


@pytest.mark.parametrize(
    ("says", "found"),
    [
        ("6 passed in 9s; ========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)", None),
        ("6 passed in 9s; ========= ERROR SUMMARY: 2 errors", "2 errors"),
        ("6 skipped in 9s; ========= ERROR SUMMARY: 0 errors", "6 skipped"),
        ("6 passed in 9s", "6 passed"),
    ],
)
def test_a_kernel_is_clean_if_it_ran_and_the_sanitizer_says_so(tmp_path, sanitizer, says, found):
    sanitizer(f"echo '{says}'")
    part = gpu_parts.sanitized(tmp_path, rehearse=False)
    written = lines(tmp_path / "sanitizers.jsonl")
    assert {line["case"].split()[0] for line in written} == {"memcheck", "racecheck"}
    if found is None:
        assert not part.failed and {line["summary"][0] for line in written} == {"0"}
    else:
        assert len(part.failed) == len(written) and all(found in line["failed"] for line in written)


def test_a_test_that_fails_under_the_sanitizer_is_not_clean(tmp_path, sanitizer):
    sanitizer("echo '1 passed, 1 failed; ========= ERROR SUMMARY: 0 errors'; exit 1")
    assert gpu_parts.sanitized(tmp_path, rehearse=False).failed


def test_a_kernel_that_takes_too_long_leaves_the_others_their_time(tmp_path, sanitizer, monkeypatch):
    monkeypatch.setattr(gpu_parts, "WATCHED", 3)
    sanitizer('case "$*" in *test_writes) sleep 9 & wait;; esac; echo "1 passed; ========= ERROR SUMMARY: 0 errors"')
    part = gpu_parts.sanitized(tmp_path, rehearse=False)
    assert part.failed == ["memcheck test_writes", "racecheck test_writes"]
    assert sum("summary" in line for line in lines(tmp_path / "sanitizers.jsonl")) == 10


def test_without_a_gpu_it_says_so_and_ends(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert gpu.main([str(tmp_path)]) == gpu_command.NO_GPU
    assert "--rehearse" in capsys.readouterr().err


def test_cases_that_stand_there_are_not_measured_again_and_failed_ones_are(tmp_path):
    calls = []

    def measured(case, error=None):
        calls.append(case)
        if error is not None:
            raise error
        return {"value": 1}

    part = gpu_parts.Part(tmp_path / "some.jsonl")
    part.add("a", lambda: measured("a"))
    part.add("b", lambda: measured("b", ValueError("no")))
    again = gpu_parts.Part(tmp_path / "some.jsonl")
    for case in "ab":
        again.add(case, lambda case=case: measured(case))
    assert calls == ["a", "b", "b"]
    assert [line.get("failed") for line in lines(tmp_path / "some.jsonl")] == [None, "ValueError: no", None]


def test_a_verdict_that_is_no_pass_counts_as_failed(tmp_path):
    for _ in range(2):
        part = gpu_parts.Part(tmp_path / "some.jsonl")
        part.add("a", lambda: {"verdict": "FAIL", "failed": "the verdict is not PASS"})
        assert part.failed == ["a"] and not part.done


def test_half_a_line_of_a_stage_that_was_killed_is_dropped(tmp_path):
    file = tmp_path / "some.jsonl"
    gpu_parts.Part(file).add("a", lambda: {"value": 1})
    file.write_text(file.read_text() + '{"case": "b", "val')
    part = gpu_parts.Part(file)
    assert part.done == {"a"}
    part.add("b", lambda: {"value": 2})
    assert [line["case"] for line in lines(file)] == ["a", "b"]


def test_what_came_back_is_collected_under_the_devices_name(monkeypatch, tmp_path):
    monkeypatch.setenv("BASS_RECORDS", str(tmp_path))
    back = tmp_path / "back"
    back.mkdir()
    (back / "exactness.jsonl").write_text('{"device": "NVIDIA H100 80GB HBM3"}\n')
    (back / "timeline.json.gz").write_bytes(b"gz")
    names = [path.name for path in gpu.collect(back)]
    assert names == ["exactness_h100_80gb_hbm3.jsonl", "timeline_h100_80gb_hbm3.json.gz"]
    assert (tmp_path / "timeline_h100_80gb_hbm3.json.gz").read_bytes() == b"gz"
    with pytest.raises(ValueError, match="no line"):
        gpu.collect(tmp_path / "nowhere")


@pytest.mark.slow
def test_tests_that_passed_are_not_run_again(monkeypatch, tmp_path):
    tests = "import os\ndef test_a(): pass\ndef test_b(): assert os.environ.get('MENDED')\n"
    (tmp_path / "test_two.py").write_text(tests)
    options = ["-q", "-p", "gpu_log", "-p", "no:cacheprovider", "--rootdir", str(tmp_path), "-c", "/dev/null"]
    stage = replace(gpu.STAGES["tests"], command=lambda *_: ["-m", "pytest", *options, str(tmp_path)])
    monkeypatch.setitem(gpu.STAGES, "tests", stage)
    assert gpu.run("tests", tmp_path)["code"] == 1
    monkeypatch.setenv("MENDED", "1")
    assert gpu.run("tests", tmp_path)["code"] == 0
    outcomes = [(line["test"].split("::")[-1], line["outcome"]) for line in lines(tmp_path / "tests.jsonl")]
    assert outcomes == [("test_a", "passed"), ("test_b", "failed"), ("test_b", "passed")]
