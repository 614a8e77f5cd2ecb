import errno
import json
import os
import random
import resource
import signal
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path

import nbformat
import pytest
import sweeps
from gpu_profile import write_gpu_profile
from tiny import tiny_model

import bass_core as bass
from bass_core.environment import write_whole
from bass_lab.evaluation import sample_file
from bass_lab.evaluation.sample_file import SampleFile
from bass_lab.locks import lock
from bass_lab.measure import records
from bass_lab.measure.modelled_costs import measured_cpu
from bass_lab.measure.profiling import Profile
from bass_lab.show import pages
from bass_lab.study.recorded_acceptance import AcceptanceTrace


@contextmanager
def full_disk(free=64):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (free, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)


def save_page(target):
    write_whole(target, pages.as_page(nbformat.v4.new_notebook()))


def trace():
    pair = bass.ModelPair(tiny_model(), tiny_model(noise=0.1))
    return bass.generate(pair, [[1, 2, 3]], max_new_tokens=4, eos_token_id=(), trace="tokens").trace


WRITERS = {
    "costs.json": lambda folder: measured_cpu().save,
    "trace.json": lambda folder: trace().save,
    "trace.json.gz": lambda folder: trace().save,
    "profile.json": lambda folder: Profile.load(write_gpu_profile(folder / "gpu.json")).save,
    "recording.npz": lambda folder: AcceptanceTrace.synthetic(alpha=0.5, length=8, sequences=4).save,
    "01_page.html": lambda folder: save_page,
}


@pytest.mark.parametrize("name", WRITERS)
def test_full_disk_leaves_the_old_file(tmp_path, name, monkeypatch):
    save, folder = WRITERS[name](tmp_path), tmp_path / "written"
    folder.mkdir()
    save(folder / name)
    whole = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert name in whole
    if name.endswith(".html"):  # a kernel writes its own files
        monkeypatch.setattr(os, "fsync", lambda file: (_ for _ in ()).throw(OSError(errno.ENOSPC, "no space")))
        with pytest.raises(OSError, match="no space"):
            save(folder / name)
    else:
        with full_disk(), pytest.raises(OSError, match="File too large"):
            save(folder / name)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == whole


def test_kill_leaves_the_old_file_or_the_new_one(tmp_path):
    path, found = tmp_path / "file", []
    for step in range(100):
        write_whole(path, "old\n" * 1000)
        ended = sweeps.killed_after(step, lambda: write_whole(path, "new\n" * 1000))
        assert path.read_text() in ("old\n" * 1000, "new\n" * 1000)
        found.append(path.read_text()[:3])
        if ended == 0:
            break
    assert ended == 0 and found[0] == "old" and found[-1] == "new" and len(found) > 3


def test_link_stays_a_link_and_device_a_device(tmp_path):
    (tmp_path / "file").write_text("old")
    (tmp_path / "link").symlink_to("file")
    write_whole(tmp_path / "link", "new")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "file").read_text() == "new"
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    write_whole(tmp_path / "pipe", "through it")
    assert os.read(reader, 100) == b"through it" and not (tmp_path / "pipe").is_file()
    os.close(reader)


def test_many_writers_leave_one_whole_file(tmp_path):
    path = tmp_path / "file"

    def write(letter):
        for _ in range(50):
            write_whole(path, letter * 10_000)

    writers = [sweeps.forked(lambda letter=letter: write(letter)) for letter in "abc"]
    assert all(os.waitpid(writer, 0)[1] == 0 for writer in writers)
    assert path.read_text() in [letter * 10_000 for letter in "abc"]
    assert [each.name for each in tmp_path.iterdir()] == ["file"]


def test_read_only_folder_keeps_its_files():
    def keeps(folder):
        if os.geteuid() == 0:  # root can write everywhere
            os.setgroups([])
            os.setresuid(65534, 65534, 65534)
        with pytest.raises(PermissionError):
            write_whole(folder / "file", "new")
        with pytest.raises(PermissionError):
            add(folder / "lines.jsonl", 2)

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_whole(folder / "file", "old")
        add(folder / "lines.jsonl", 1)
        (folder / "lines.jsonl").chmod(0o444)
        folder.chmod(0o555)
        assert os.waitpid(sweeps.forked(lambda: keeps(folder)), 0)[1] == 0
        folder.chmod(0o755)
        assert (folder / "file").read_text() == "old" and numbers(folder / "lines.jsonl") == [1]
        assert len(list(folder.iterdir())) == 2


def numbers(path):
    return [line["n"] for line in records.read(path, check=lambda line: None)]


def add(path, *new):
    records.append(path, [{"n": number, "filled": "x" * 50} for number in new], check=lambda line: None)


def test_lines_are_added_after_half_a_line(tmp_path):
    path = tmp_path / "lines.jsonl"
    add(path, 1, 2)
    whole = path.read_bytes()
    for half in range(1, len(whole)):
        path.write_bytes(whole[:half])
        there = [json.loads(line)["n"] for line in whole[: half + 1].splitlines(keepends=True) if line.endswith(b"\n")]
        add(path, 3)
        assert numbers(path) == [*there, 3]


def test_full_disk_adds_no_line(tmp_path):
    path = tmp_path / "lines.jsonl"
    add(path, 1)
    whole = path.read_bytes()
    with full_disk(len(whole) + 20), pytest.raises(OSError, match="File too large"):
        add(path, 2)
    assert path.read_bytes() == whole
    add(path, 2, 3)
    assert numbers(path) == [1, 2, 3]


def test_killed_writers_lose_and_double_no_line(tmp_path):
    path, draw = tmp_path / "lines.jsonl", random.Random(0)
    told = {}

    def write(first):
        read, written = os.pipe()

        def work():
            for number in range(first, first + 10_000):
                add(path, number)
                os.write(written, b".")  # the line is complete

        child = sweeps.forked(work)
        os.close(written)
        return child, read

    for turn in range(4):
        begun = {first: write(first) for first in (20_000 * turn, 20_000 * turn + 10_000)}
        time.sleep(draw.uniform(0.02, 0.15))
        for first, (child, read) in begun.items():
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            told[first] = len(os.read(read, 10**6))
            os.close(read)
    add(path, -1)
    found = numbers(path)
    assert len(found) == len(set(found)) and found[-1] == -1 and sum(told.values()) > 20
    for first, count in told.items():
        own = [number for number in found if first <= number < first + 10_000]
        assert own == list(range(first, first + len(own))) and count <= len(own) <= count + 1


def test_writer_waits_for_another_line(tmp_path):
    path = tmp_path / "lines.jsonl"
    add(path, 1)
    begun, told = os.pipe()

    def write_slowly():
        with path.open("ab", buffering=0) as file:
            lock(file.fileno())
            file.write(b'{"n": ')
            os.write(told, b".")
            time.sleep(0.3)
            file.write(b"2}\n")

    child = sweeps.forked(write_slowly)
    os.read(begun, 1)
    add(path, 3)
    assert os.waitpid(child, 0)[1] == 0 and numbers(path) == [1, 2, 3]


def test_full_disk_stores_no_part_of_a_sample(tmp_path):
    path = tmp_path / "batched.jsonl"
    with SampleFile(path, {"seed": 0}, {}) as file:
        file.append({"task_id": "one"})
        with full_disk(path.stat().st_size + 1000), pytest.raises(OSError, match="File too large"):
            file.append({"task_id": "two", "filled": "x" * 2000})
    assert list(sample_file.read(path)[1]) == ["one"]
    with SampleFile(path, {"seed": 0}, {}) as file:
        file.append({"task_id": "two"})
    assert list(sample_file.read(path)[1]) == ["one", "two"]
