import os
import subprocess
import sys
import threading
import time

import pytest
import torch
from typer.testing import CliRunner

from bass_lab import threads
from bass_lab.cli.main import app

WARNING = ": times measured now are unreliable"


def speeds(one: float, two: float):
    return {1: one, 2: two}.__getitem__


@pytest.fixture
def machine(monkeypatch):
    def use(others: float, one: float = 1.0, two: float = 2.0) -> None:
        monkeypatch.setattr(threads, "cpus_of_others", lambda seconds: others)
        monkeypatch.setattr(threads, "speed", speeds(one, two))

    for name in threads.SETTINGS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1})
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    use(0.0)
    monkeypatch.setattr(threads, "_before", {})
    yield use
    threads._idle_team.keep(0)
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("others", "one", "two", "chosen", "sentence"),
    [
        (0.1, 1.0, 1.6, 2, "Threads: 2, spinning while waiting; other programs use 0.1 of 2 CPUs."),
        (0.1, 1.0, 0.3, 1, "Threads: 1, faster here than 2; other programs use 0.1 of 2 CPUs."),
        (0.1, 1.0, 0.9, 2, "Threads: 2, spinning while waiting; other programs use 0.1 of 2 CPUs."),
        (1.9, 1.0, 1.0, 1, f"Threads: 1, faster here than 2; other programs use 1.9 of 2 CPUs{WARNING}."),
        (1.9, 1.0, 1.2, 2, f"Threads: 2, sleeping while waiting; other programs use 1.9 of 2 CPUs{WARNING}."),
    ],
)
def test_choice_depends_on_free_cpus_and_speeds(others, one, two, chosen, sentence):
    choice = threads.choose(2, others, 2, speeds(one, two))
    assert choice == threads.Choice(chosen, others > 1, sentence)


def test_one_thread_is_not_timed_and_free_cpus_do_not_count():
    sentence = "Threads: 1, the only thread; other programs use 0.0 of 1 CPUs."
    assert threads.choose(1, 0.0, 1, None) == threads.Choice(1, False, sentence)
    assert threads.is_busy(16, 1.0, 16) and not threads.is_busy(8, 7.0, 16)


def test_settings_of_the_user_count():
    for name, value in (("OMP_NUM_THREADS", "8"), ("MKL_NUM_THREADS", "8"), ("OMP_WAIT_POLICY", "PASSIVE")):
        assert threads.settled_by_user({name: value}, 8, 8)
    assert threads.settled_by_user({}, 2, 8)
    assert not threads.settled_by_user({}, 8, 8)
    assert not threads.settled_by_user({}, 4, 8)  # torch counts cores, the system counts hardware threads


def test_settings_of_the_user_stay(machine, monkeypatch):
    machine(others=2.0, one=9.0)
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    assert threads.settle_threads(pytest.fail) is None
    assert torch.get_num_threads() == 2


def test_settling_prints_one_line_and_starts_from_all_threads(machine, capsys):
    machine(others=0.0, one=2.0, two=1.0)
    assert threads.settle_threads().threads == torch.get_num_threads() == 1
    assert capsys.readouterr().out.count("\n") == 1
    machine(others=0.0)
    assert threads.settle_threads(str).threads == torch.get_num_threads() == 2


@pytest.mark.parametrize(("arguments", "said"), [(["notebooks"], 1), (["notebooks", "--help"], 0)])
def test_command_reports_threads_on_standard_error(machine, monkeypatch, tmp_path, arguments, said):
    monkeypatch.chdir(tmp_path)  # a folder without lessons
    monkeypatch.setattr(sys, "argv", ["bass", *arguments])
    result = CliRunner().invoke(app, arguments)
    assert result.stderr.count("Threads: 2, spinning") == said
    assert "Threads: 2" not in result.stdout


def idle_teams() -> int:
    return sum(thread.name == "idle OpenMP team" for thread in threading.enumerate())


def test_idle_team_lives_while_the_machine_is_busy(machine):
    for others, expected in ((0.0, 0), (2.0, 1), (2.0, 1)):
        machine(others)
        threads.settle_threads(str)
        assert idle_teams() == expected
    machine(0.0)
    threads.settle_threads(str)
    for _ in range(100):
        time.sleep(0.02 * idle_teams())
    assert idle_teams() == 0


@pytest.mark.skipif(not threads.TICKS.exists(), reason="the system does not tell who uses its CPUs")
def test_cpus_of_others_excludes_this_process(monkeypatch):
    ticks = threads._busy_seconds()
    until = time.process_time() + 0.2
    while time.process_time() < until:
        pass
    assert threads._busy_seconds() - ticks > 0.15  # the total contains our time

    seconds = iter([10.0, 11.5])
    monkeypatch.setattr(threads, "_busy_seconds", lambda: next(seconds))
    monkeypatch.setattr(threads.time, "process_time", iter([3.0, 4.0]).__next__)
    monkeypatch.setattr(threads.time, "monotonic", iter([0.0, 0.25]).__next__)
    assert threads.cpus_of_others(0.0) == pytest.approx(0.5 / 0.25)


def test_timing_keeps_the_number_of_threads():
    before = torch.get_num_threads()
    assert threads.speed(2) > 0
    assert torch.get_num_threads() == before


WAITING = """
import time, torch
from bass_lab import threads

def used_while_nothing_is_done():
    numbers, used = torch.ones(2**17), 0.0
    for _ in range(40):
        numbers.exp()  # by both threads; the second one then waits for more
        before = time.process_time()
        time.sleep(0.005)
        used += time.process_time() - before
    return used

torch.set_num_threads(2)
print(used_while_nothing_is_done())
threads._idle_team.keep(2)
print(used_while_nothing_is_done())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="torch has the OpenMP of GNU on Linux")
@pytest.mark.ci
def test_threads_next_to_an_idle_team_sleep():
    environment = {name: value for name, value in os.environ.items() if name not in threads.SETTINGS}
    done = subprocess.run([sys.executable, "-c", WAITING], env=environment, capture_output=True, text=True, check=True)
    awake, asleep = map(float, done.stdout.split())
    assert asleep < awake / 3, done.stdout
