"""Files of prompts: what their lines may be, what is refused by file, line and field, and what records call them."""

import gzip
import json

import lesson_runs
import pytest
from tiny import BYTES, byte_tokenizer, tiny_model
from typer.testing import CliRunner

import bass_core as bass
from bass_lab.checks import exactness
from bass_lab.cli import main
from bass_lab.lessons.l03_explorer import AcceptanceExplorer
from bass_lab.measure import records
from bass_lab.study.recorded_acceptance import AcceptanceTrace
from bass_lab.sweep import planning
from bass_lab.texts.prompt_sets import label, prompt_set

ASKED = [{"role": "user", "content": "2 + 2?"}]
CHAT = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
TEXTS = ["def add(a, b):\n", "def largest(numbers):\n", "def first(items):\n"]


def written(folder, *lines, name="mine.jsonl"):
    """A file with these lines, objects or texts."""
    path = folder / name
    path.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines), "utf-8")
    return path


@pytest.fixture
def mine(tmp_path):
    return written(tmp_path, *[{"prompt": text} for text in TEXTS])


@pytest.fixture(scope="module")
def chatting():
    """A pair whose tokenizer has a chat template."""
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = CHAT
    return bass.ModelPair(tiny_model(vocab_size=BYTES), tiny_model(vocab_size=BYTES, noise=0.02), tokenizer)


# --- what a line may be ---


@pytest.mark.parametrize(
    ("line", "prompt"),
    [
        ({"task_id": "HumanEval/0", "prompt": "def f():\n", "canonical_solution": "", "test": ""}, "def f():\n"),
        ({"prompt": ASKED, "answer": "4"}, ASKED),
        ({"messages": ASKED}, ASKED),
        ({"question_id": 81, "category": "writing", "turns": ["2 + 2?", "And 3?"], "reference": []}, ASKED),
        ({"question_id": "a", "category": "qa", "turns": ["2 + 2?"], "source": "x", "multiturn": False}, ASKED),
    ],
    ids=["HumanEval", "prompt as a conversation", "messages", "Spec-Bench", "SPEED-Bench"],
)
def test_a_line_is_a_text_or_a_conversation(tmp_path, line, prompt):
    assert prompt_set(written(tmp_path, line, "", line)) == [prompt, prompt]  # an empty line is none


def test_a_file_may_be_gzipped_named_by_a_string_and_begin_with_a_mark(mine):
    packed = mine.with_suffix(".jsonl.gz")
    packed.write_bytes(gzip.compress(b"\xef\xbb\xbf" + mine.read_bytes()))
    assert prompt_set(str(packed), 2) == prompt_set(mine, 2) == TEXTS[:2]


def test_a_line_that_is_no_json_is_refused_by_file_and_line(tmp_path):
    (tmp_path / "mine.jsonl").write_text('{"prompt": "a"}\nhello\n')
    with pytest.raises(ValueError, match=r"mine.jsonl, line 2 is no JSON: Expecting value"):
        prompt_set(str(tmp_path / "mine.jsonl"))


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ({"text": "hello", "id": 3}, "it has none of the fields prompt, messages, turns; it has text, id"),
        ({}, "it has none of the fields prompt, messages, turns; it has no field"),
        (["hello"], "it is list, and no JSON object"),
        ({"prompt": 3}, "its field prompt must be a text or a conversation, .*; got 3"),
        ({"prompt": ""}, 'its field prompt must be a text or a conversation, .*; got ""'),
        ({"messages": "hello"}, 'its field messages must be a conversation, .*; got "hello"'),
        ({"messages": []}, r"its field messages must be a conversation, .*; got \[\]"),
        ({"messages": [{"role": "user"}]}, "its field messages must be a conversation"),
        ({"turns": []}, r"its field turns must be a list of texts; got \[\]"),
        ({"turns": [[3]]}, r"its field turns must be a list of texts; got \[\[3\]\]"),
        ({"turns": ["FULL BENCHMARK DATA SHOULD BE FETCHED FROM …"]}, "its field turns is masked; .*prepare_data.py"),
    ],
)
def test_what_is_no_prompt_is_refused_by_file_line_and_field(tmp_path, line, said):
    with pytest.raises(ValueError, match=f"mine.jsonl, line 2 is not a prompt: {said}"):
        prompt_set(written(tmp_path, {"prompt": "a"}, line))


@pytest.mark.parametrize(("name", "data"), [("a.jsonl", b"\xff\xfe"), ("a.jsonl.gz", b"no archive")])
def test_a_file_that_cannot_be_read_is_refused_by_name(tmp_path, name, data):
    (tmp_path / name).write_bytes(data)
    with pytest.raises(ValueError, match=f"{name} is no file of JSON lines: "):
        prompt_set(tmp_path / name)


def test_a_file_gives_no_more_prompts_than_it_has(mine):
    with pytest.raises(ValueError, match=r"mine\.jsonl' has 3 prompts, count=4 was asked for"):
        prompt_set(str(mine), 4)


def test_a_file_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"nowhere\.jsonl"):
        prompt_set(tmp_path / "nowhere.jsonl")


# --- what records call it ---


def test_two_files_of_one_name_are_told_apart(tmp_path, mine):
    (tmp_path / "other").mkdir()
    other = written(tmp_path / "other", {"prompt": "a"})
    assert label(mine).startswith("mine.jsonl ") and label(other).startswith("mine.jsonl ")
    assert label(mine) != label(other)
    assert label("mini") == "mini"


# --- wherever a prompt set is named ---


def run(*arguments):
    return CliRunner().invoke(main.app, [str(argument) for argument in arguments])


def test_bench_measures_a_file_and_its_record_says_which(mine, tmp_path):
    limits = ["--rows", 2, "--repeats", 2, "--max-new-tokens", 4, "--methods", "regular", "--methods", "batched"]
    done = run("bench", "--prompts", mine, *limits, "--record", tmp_path / "record.jsonl")
    assert done.exit_code == 0, done.output
    assert {line["prompt_set"] for line in records.read(tmp_path / "record.jsonl")} == {label(mine)}


def test_record_takes_a_file_and_its_trace_says_which(mine, tmp_path):
    done = run("record", tmp_path / "trace.npz", "--prompts", mine, "--count", 2, "--max-new-tokens", 4)
    assert done.exit_code == 0, done.output
    trace = AcceptanceTrace.load(tmp_path / "trace.npz")
    assert trace.meta["prompt_set"] == label(mine) and len(trace.lengths) == 2


def test_verify_takes_a_file(mine, monkeypatch):
    def told(pair, prompts, **options):
        raise ValueError(f"asked to verify {prompts}")

    monkeypatch.setattr(exactness, "verify", told)
    assert run("verify", "--prompts", mine).stderr == f"error: asked to verify {TEXTS}\n"


def test_conversations_of_a_file_are_checked_by_a_pair_with_a_chat_template(chatting, tmp_path):
    prompts = prompt_set(written(tmp_path, {"messages": ASKED}, {"turns": ["Why?"]}))
    report = exactness.verify(chatting, prompts, samples=1000, max_new_tokens=4)
    assert report.passed, report.to_json()


def test_the_embedded_pair_says_that_it_has_no_chat_template(tmp_path):
    done = run("record", tmp_path / "x.npz", "--prompts", written(tmp_path, {"messages": ASKED}), "--count", 1)
    assert done.exit_code == 2
    assert "prompt 0: a conversation needs a tokenizer with a chat template" in done.stderr


def test_the_explorer_shows_a_file_beside_our_sets(mine):
    explorer = AcceptanceExplorer(bass.load_pair(), prompt_set=str(mine), batch_size=2, max_new_tokens=4)
    assert list(explorer.prompts) == ["mini", "library", label(mine)]
    assert explorer.record()["prompt_set"] == label(mine)


def test_the_explorer_shows_a_conversation_as_its_template_writes_it(chatting, tmp_path):
    path = written(tmp_path, {"messages": ASKED}, {"messages": ASKED})
    explorer = AcceptanceExplorer(chatting, prompt_set=str(path), batch_size=2, max_new_tokens=4)
    assert explorer.view.prompts == ["user: 2 + 2?\n"] * 2


def test_a_sweep_runs_again_for_a_file_that_has_changed(mine):
    def runs() -> set[str]:
        return set(
            planning.plan(lesson_runs.NOTEBOOKS / "08_latency_and_utilization.ipynb", [f"prompt_set=mini,{mine}"]).runs
        )

    before = runs()
    written(mine.parent, {"prompt": "another"})
    assert len(before) == 2 and len(before & runs()) == 1
