"""The models and the commit of a measurement. The query of the commit changes no file and starts no program."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

import bass_core as bass
from bass_core.loading.model_pair import ASSETS
from bass_lab import provenance
from bass_lab.drafters import LayerSkipDrafter


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """repository(path): commit the module to a new repository and return its git."""

    def git(*arguments):
        user = ["-c", "user.name=a", "-c", "user.email=a@b"]
        done = subprocess.run(["git", *user, *arguments], cwd=tmp_path, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    def made(path):
        file = tmp_path / path
        file.parent.mkdir(parents=True)
        file.write_text("a = 1\n")
        git("init")
        git("add", ".")
        git("commit", "-m", "first")
        monkeypatch.setattr(provenance, "__file__", str(file))
        return git

    return made


def test_commit_and_changes_of_this_repository(repository, tmp_path):
    git = repository(provenance.HERE)
    assert provenance._commit() == git("rev-parse", "--short=12", "HEAD")
    found = set()
    for number in (2, 3):
        (tmp_path / provenance.HERE).write_text(f"a = {number}\n")
        commit, _, changes = provenance._commit().partition("+")
        assert commit == git("rev-parse", "--short=12", "HEAD") and len(changes) == 6
        found.add(changes)
    assert len(found) == 2


def test_records_name_the_loaded_models(tmp_path):
    shutil.copytree(ASSETS / "draft", tmp_path / "mine")
    drafts = {None: "embedded pair", "feature_head": "embedded target + embedded feature_head"}
    drafts |= {"ngram": "embedded target + n-gram lookup", tmp_path / "mine": "embedded target + LlamaForCausalLM mine"}
    drafts |= {LayerSkipDrafter(4): "embedded target + LayerSkipDrafter layers=4"}
    for draft, name in drafts.items():
        assert provenance.describe_run(bass.load_pair(draft=draft, dtype="float32"))["models"] == name
    in_bits = provenance.describe_run(bass.load_pair(quantize={"draft": "int8"}))
    assert in_bits["models"] == "embedded target + embedded draft (int8)" and not in_bits["synthetic"]


def test_surrounding_repository_is_ignored(repository, monkeypatch, tmp_path):
    repository("environment/site-packages/bass_lab/provenance.py")
    assert provenance._commit() == ""
    monkeypatch.setattr(provenance, "__file__", str(tmp_path / "environment/not_committed.py"))
    assert provenance._commit() == ""


def test_environment_names_the_commit_of_a_copy(repository, monkeypatch):
    repository(provenance.HERE)
    monkeypatch.setenv("BASS_COMMIT", "abc")
    assert provenance._commit() == "abc"


def test_query_writes_no_index_and_starts_no_program(repository, tmp_path):
    git = repository(provenance.HERE)
    spy = tmp_path / "spy"
    spy.write_text(f"#!/bin/sh\ntouch {tmp_path}/was_started\n")
    spy.chmod(0o755)
    git("config", "core.fsmonitor", str(spy))
    (tmp_path / provenance.HERE).touch()  # `git status` would rewrite the outdated index
    before = (tmp_path / ".git/index").read_bytes(), (tmp_path / ".git/index").stat().st_mtime_ns
    assert provenance._commit() == git("rev-parse", "--short=12", "HEAD")
    assert ((tmp_path / ".git/index").read_bytes(), (tmp_path / ".git/index").stat().st_mtime_ns) == before
    assert not (tmp_path / "was_started").exists()


def test_actions_are_pinned_by_commit():
    workflows = Path(__file__).parents[2].glob(".github/workflows/*.yml")
    used = re.findall(r"uses: (.*)", "".join(path.read_text() for path in workflows))
    assert used and all(re.fullmatch(r"[\w/-]+@[0-9a-f]{40} # v[\d.]+", each) for each in used)
