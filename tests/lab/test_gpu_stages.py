"""`make gpu` rehearsed on a CPU: stages, files, time limits, and resumed stages."""

import json
import os
from collections import Counter
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import sweeps
from recording import use_on_cpu
from tiny import ragged_prompts, tiny_model
from waiting import until

import bass_core as bass
from bass_lab.gpu import parts, stages
from bass_lab.measure import records


def lines(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text().splitlines()]


@pytest.fixture
def sanitizer(tmp_path, monkeypatch):
    """Put a fake compute-sanitizer with these shell lines first in PATH. python: shell lines that replace the tests."""

    def put(script: str, python: str | None = "echo 6 passed in 9s") -> None:
        programs = tmp_path / "bin"
        programs.mkdir(exist_ok=True)
        for name, lines in ((parts.SANITIZER[0], script), ("python", python)):
            (programs / name).write_text(f"#!/bin/sh\n{lines}\n")
            (programs / name).chmod(0o755)
        monkeypatch.setenv("PATH", str(programs), prepend=os.pathsep)
        if python is not None:
            monkeypatch.setattr(parts.sys, "executable", str(programs / "python"))

    return put


@pytest.mark.slow
def test_rehearsal_writes_all_files_of_the_stages(tmp_path, capfd, sanitizer):
    sanitizer(
        'until [ "$1" = --tool ]; do shift; done; shift 2; "$@" && echo "========= ERROR SUMMARY: 0 errors"', None
    )
    assert stages.main([str(tmp_path), "--rehearse"]) == 0
    summaries = [json.loads(line) for line in capfd.readouterr().out.splitlines() if line.startswith('{"stage"')]
    assert [summary["stage"] for summary in summaries] == list(stages.STAGES)
    for summary in summaries:
        assert summary["code"] == 0 and "missing" not in summary["files"].values()
    outcomes = Counter(line["outcome"] for line in lines(tmp_path / "tests.jsonl"))
    assert set(outcomes) == {"passed", "skipped"} and outcomes["passed"] > 30  # the CPU rehearses enough tests
    assert not [line for file in tmp_path.glob("*.jsonl") for line in lines(file) if "failed" in line]


def test_commands_of_stages():
    files = [Path(name) for name in stages.STAGES["tests"].command("", "", True) if name.endswith(".py")]
    assert {"test_gpu_steps.py", "test_gpu_kernels.py"} <= {file.name for file in files}
    assert all((records.ROOT / file).exists() for file in files)
    # a short stage keeps half of its time for measuring
    for seconds, begins in ((460, 330), (150, 75), (30, 15)):
        assert float(stages.STAGES["decode"].command("folder", str(seconds), False)[-1]) == begins


@pytest.mark.parametrize(("seconds", "code"), [(60, None), (0.2, 0)], ids=["at its limit", "before"])
def test_stage_ends_with_its_processes(monkeypatch, tmp_path, seconds, code):
    mark = tmp_path / "process"
    fork = f"child = os.fork(); child or open({str(mark)!r}, 'w').write(str(os.getpid()))"
    program = f"import os, time; {fork}; time.sleep({seconds} if child else 60)"
    stage = replace(stages.STAGES["tests"], command=lambda folder, seconds, rehearse: ["-c", program])
    monkeypatch.setitem(stages.STAGES, "tests", stage)
    summary = stages.run("tests", tmp_path, seconds=1.5)
    assert summary["code"] == code and summary["files"] == {"tests.jsonl": "missing"}
    child = int(mark.read_text())
    until(lambda: not sweeps.alive(child), 10)  # a signal takes a moment


def test_stage_without_its_packages_is_left_out(monkeypatch, tmp_path):
    for lacking in ({"needs": "no_such_package"}, {"program": "no-such-program"}):
        monkeypatch.setitem(stages.STAGES, "tests", replace(stages.STAGES["tests"], **lacking))
        (name,) = lacking.values()
        assert stages.run("tests", tmp_path)["left_out"] == f"{name} is not installed here"


@pytest.mark.parametrize(
    ("says", "found"),
    [
        ("6 passed in 9s; ========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)", None),
        ("6 passed in 9s; ========= ERROR SUMMARY: 2 errors", "2 errors"),
        ("6 skipped in 9s; ========= ERROR SUMMARY: 0 errors", "6 skipped"),
        ("6 passed in 9s", "6 passed"),
    ],
)
def test_clean_kernel_ran_without_sanitizer_errors(tmp_path, sanitizer, says, found):
    sanitizer(f"echo '{says}'")
    part = parts.sanitized(tmp_path, rehearse=False)
    unwatched, *written = lines(tmp_path / "sanitizers.jsonl")
    assert (unwatched["case"], unwatched["summary"]) == ("unwatched", "6 passed in 9s")
    assert {line["case"].split()[0] for line in written} == {"memcheck", "racecheck"}
    if found is None:
        assert not part.failed and {line["summary"][0] for line in written} == {"0"}
    else:
        assert len(part.failed) == len(written) and all(found in line["failed"] for line in written)


def test_slow_kernel_is_cut_off_and_runs_last_next_time(tmp_path, sanitizer, monkeypatch):
    monkeypatch.setattr(parts, "WATCHED", 0.7)
    sanitizer('case "$*" in *test_writes) sleep 9 & wait;; esac; echo "1 passed; ========= ERROR SUMMARY: 0 errors"')
    part, slow = parts.sanitized(tmp_path, rehearse=False), ["memcheck test_writes", "racecheck test_writes"]
    file = tmp_path / "sanitizers.jsonl"
    watched = [line["case"] for line in lines(file) if "summary" in line][1:]
    assert part.failed == slow and len(watched) == 12 and "racecheck test_attention" in watched
    kept = [line for line in file.read_text().splitlines() if "unwatched" in line or "test_writes" in line]
    file.write_text("".join(f"{line}\n" for line in kept))  # like a killed run
    assert parts.sanitized(tmp_path, rehearse=False).failed == slow
    assert [line["case"] for line in lines(file)][-2:] == slow and len(lines(file)) == 3 + 14


def test_failing_kernels_are_not_sanitized(tmp_path, sanitizer):
    sanitizer('echo "1 passed; ========= ERROR SUMMARY: 0 errors"', python="echo 1 failed, 5 passed; exit 1")
    assert parts.sanitized(tmp_path, rehearse=False).failed == ["unwatched"]
    assert len(lines(tmp_path / "sanitizers.jsonl")) == 1


def test_nothing_is_recorded_in_a_timeline(monkeypatch):
    """Without overlapped steps, as under a profiler, ending rows need other captures."""
    use_on_cpu(monkeypatch)
    made, original = [], parts.profile

    @contextmanager
    def watched():
        before = session.device_step.recordings
        with original() as found:
            yield found
        made.append(session.device_step.recordings - before)

    monkeypatch.setattr(parts, "profile", watched)
    pair = bass.ModelPair(tiny_model(num_hidden_layers=1), tiny_model(num_hidden_layers=1, noise=0.1))
    with bass.Session(pair, max_batch_size=4, compile="graphs", eos_token_id=range(0, 60, 9)) as session:
        found = parts.timeline(session, ragged_prompts(5, 9, 3, 7), max_new_tokens=12)
    assert made[0] > 0 and made[-1] == 0 and len(found.steps) > 3


def test_only_failed_cases_are_measured_again(tmp_path):
    calls, file = [], tmp_path / "some.jsonl"

    def measured(case, error=None):
        calls.append(case)
        if error is not None:
            raise error
        return {"value": 1}

    part = parts.PartFile(file)
    part.case("a", lambda: measured("a"))
    part.case("b", lambda: measured("b", ValueError("no")))
    part.case("c", lambda: {"verdict": "FAIL", "failed": "the verdict is not PASS"})
    assert part.failed == ["b", "c"]
    file.write_text(file.read_text() + '{"case": "d", "val')  # half a line of a killed stage is dropped
    again = parts.PartFile(file)
    for case in "abd":
        again.case(case, lambda case=case: measured(case))
    assert calls == ["a", "b", "b", "d"]
    assert [line.get("failed") for line in lines(file) if line["case"] != "c"] == [None, "ValueError: no", None, None]


@pytest.mark.slow
def test_tests_that_passed_are_not_run_again(monkeypatch, tmp_path):
    tests = "import os\ndef test_a(): pass\ndef test_b(): assert os.environ.get('MENDED')\n"
    (tmp_path / "test_two.py").write_text(tests)
    options = ["-q", "-p", "gpu_log", "-p", "no:cacheprovider", "--rootdir", str(tmp_path), "-c", "/dev/null"]
    stage = replace(stages.STAGES["tests"], command=lambda *_: ["-m", "pytest", *options, str(tmp_path)])
    monkeypatch.setitem(stages.STAGES, "tests", stage)
    assert stages.run("tests", tmp_path)["code"] == 1
    monkeypatch.setenv("MENDED", "1")
    assert stages.run("tests", tmp_path)["code"] == 0
    assert stages.run("tests", tmp_path)["code"] == 0  # nothing is left
    outcomes = [(line["test"].split("::")[-1], line["outcome"]) for line in lines(tmp_path / "tests.jsonl")]
    assert outcomes == [("test_a", "passed"), ("test_b", "failed"), ("test_b", "passed")]
