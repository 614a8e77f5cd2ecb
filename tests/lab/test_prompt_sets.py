import gzip
import json

import lesson_runs
import pytest
from commands import invoke
from tiny import BYTES, byte_tokenizer, tiny_model

import bass_core as bass
from bass_lab.checks import exactness
from bass_lab.lessons.l03_explorer import AcceptanceExplorer
from bass_lab.measure import records
from bass_lab.study.recorded_acceptance import AcceptanceTrace
from bass_lab.sweep import planning
from bass_lab.texts.prompt_sets import label, prompt_set

ASKED = [{"role": "user", "content": "2 + 2?"}]
CHAT = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
TEXTS = ["def add(a, b):\n", "def largest(numbers):\n", "def first(items):\n"]


def written(folder, *lines, name="mine.jsonl"):
    path = folder / name
    path.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines), "utf-8")
    return path


@pytest.fixture
def mine(tmp_path):
    return written(tmp_path, *[{"prompt": text} for text in TEXTS])


@pytest.fixture(scope="module")
def chatting():
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = CHAT
    small = {"vocab_size": BYTES, "num_hidden_layers": 1}
    return bass.ModelPair(tiny_model(**small), tiny_model(**small, noise=0.02), tokenizer)


LINES = [
    ({"task_id": "HumanEval/0", "prompt": "def f():\n", "canonical_solution": "", "test": ""}, "def f():\n"),
    ({"prompt": ASKED, "answer": "4"}, ASKED),
    ({"messages": ASKED}, ASKED),
    ({"question_id": 81, "category": "writing", "turns": ["2 + 2?", "And 3?"], "reference": []}, ASKED),  # Spec-Bench
    ({"question_id": "a", "category": "qa", "turns": ["2 + 2?"], "source": "x"}, ASKED),  # SPEED-Bench
]


def test_lines_are_texts_or_conversations(tmp_path):
    file = written(tmp_path, *[line for line, _ in LINES], "", LINES[0][0])  # an empty line is ignored
    assert prompt_set(file) == [*[prompt for _, prompt in LINES], "def f():\n"]


def test_file_may_be_gzipped_and_begin_with_a_byte_order_mark(mine):
    packed = mine.with_suffix(".jsonl.gz")
    packed.write_bytes(gzip.compress(b"\xef\xbb\xbf" + mine.read_bytes()))
    assert prompt_set(str(packed), 2) == prompt_set(mine, 2) == TEXTS[:2]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ({"text": "hello", "id": 3}, "it needs one of the fields prompt, messages, turns; it has text, id"),
        ({}, "it needs one of the fields prompt, messages, turns; it has no field"),
        (["hello"], "it must be a JSON object, got list"),
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
def test_line_without_a_prompt_is_refused_by_file_line_and_field(tmp_path, line, said):
    with pytest.raises(ValueError, match=f"mine.jsonl, line 2 is not a prompt: {said}"):
        prompt_set(written(tmp_path, {"prompt": "a"}, line))


def test_unreadable_file_name_or_count_is_refused(tmp_path, mine):
    for name, count, said in (
        (str(mine), 4, r"from 1 to 3 for .*mine\.jsonl'; got 4"), ("mini", 165, "'mini'; got 165"),
        ("library", 97, "'library'; got 97"), ("mini", 0, "'mini'; got 0"), ("functions", 1, "mini, library"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=said):
            prompt_set(name, count)
    for name, data, said in (
        ("a.jsonl", b"\xff\xfe", "a.jsonl is no file of JSON lines: "),
        ("a.jsonl.gz", b"no archive", "a.jsonl.gz is no file of JSON lines: "),
        ("b.jsonl", b'{"prompt": "a"}\nhello\n', "b.jsonl, line 2 is no JSON: Expecting value"),
    ):
        (tmp_path / name).write_bytes(data)
        with pytest.raises(ValueError, match=said):
            prompt_set(tmp_path / name)
    with pytest.raises(FileNotFoundError, match=r"nowhere\.jsonl"):
        prompt_set(tmp_path / "nowhere.jsonl")


def test_files_of_one_name_have_different_labels(tmp_path, mine):
    (tmp_path / "other").mkdir()
    other = written(tmp_path / "other", {"prompt": "a"})
    assert label(mine).startswith("mine.jsonl ") and label(other).startswith("mine.jsonl ")
    assert label(mine) != label(other)
    assert label("mini") == "mini"


def test_record_of_bench_and_recorded_trace_name_the_file(mine, tmp_path):
    limits = ["--batch-sizes", 2, "--repeats", 1, "--max-new-tokens", 2, "--methods", "regular", "--methods", "batched"]
    done = invoke("bench", "--prompts", mine, *limits, "--record", tmp_path / "record.jsonl")
    assert done.exit_code == 0, done.output
    assert {line["prompt_set"] for line in records.read(tmp_path / "record.jsonl")} == {label(mine)}
    done = invoke("record", "--output", tmp_path / "trace.npz", "--prompts", mine, "--count", 2, "--max-new-tokens", 4)
    assert done.exit_code == 0, done.output
    trace = AcceptanceTrace.load(tmp_path / "trace.npz")
    assert trace.meta["prompt_set"] == label(mine) and len(trace.lengths) == 2


def test_verify_takes_a_file(mine, monkeypatch):
    def told(pair, prompts, **options):
        raise ValueError(f"asked to verify {prompts}")

    monkeypatch.setattr(exactness, "verify", told)
    assert invoke("verify", "--prompts", mine).stderr == f"error: asked to verify {TEXTS}\n"


@pytest.mark.ci
def test_pair_with_a_chat_template_takes_conversations(chatting, tmp_path):
    prompts = prompt_set(written(tmp_path, {"messages": ASKED}, {"turns": ["Why?"]}))
    report = exactness.verify(chatting, prompts, samples=1000, max_new_tokens=4)
    assert report.passed, report.to_json()


def test_explorer_offers_a_file(mine):
    explorer = AcceptanceExplorer(bass.load_pair(), prompt_set=str(mine), batch_size=2, max_new_tokens=4)
    assert list(explorer.prompts) == ["mini", "library", label(mine)]
    assert explorer.record()["prompt_set"] == label(mine)


def test_explorer_shows_a_conversation_by_its_template(chatting, tmp_path):
    path = written(tmp_path, {"messages": ASKED}, {"messages": ASKED})
    explorer = AcceptanceExplorer(chatting, prompt_set=str(path), batch_size=2, max_new_tokens=4)
    assert explorer.view.prompts == ["user: 2 + 2?\n"] * 2


def test_changed_file_makes_other_runs_of_a_sweep(mine):
    def runs() -> set[str]:
        return set(planning.plan(lesson, [f"prompt_set=mini,{mine}"]).runs)

    lesson = lesson_runs.NOTEBOOKS / "08_latency_and_utilization.ipynb"
    before = runs()
    written(mine.parent, {"prompt": "another"})
    assert len(before) == 2 and len(before & runs()) == 1
