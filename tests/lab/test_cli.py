"""`bass doctor`, `generate`, `notebooks` and `demo`: plain output, one-line errors, exit codes."""

import json
import re
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import nbformat
import pytest
import torch
from commands import invoke
from tiny import BYTES, byte_tokenizer, tiny_model

import bass_core as bass
from bass_core import generation
from bass_lab.cli import decoding
from bass_lab.show import pages

PROMPT = "def add(a, b):\n"
NEW = 16


def words(text: str) -> str:
    return " ".join(text.split())


def save(folder: Path, tokenizer=None, **model) -> Path:
    tiny_model(vocab_size=BYTES, **model).save_pretrained(folder)
    (tokenizer or byte_tokenizer()).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> Path:
    return save(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def draft(tmp_path_factory) -> Path:
    return save(tmp_path_factory.mktemp("draft"), noise=0.1, max_position_embeddings=64)


def test_version_is_one_line():
    assert invoke("--version").output == f"bass {bass.__version__}\n"


def test_doctor_without_a_target_describes_the_embedded_pair():
    result = invoke("doctor")
    assert result.exit_code == 0, result.output
    for expected in (torch.__version__, version("transformers"), "optional packages", "same tokens", "Goodput("):
        assert expected in result.stdout
    assert "{" not in result.stdout and result.stderr == ""


def test_doctor_prints_json_only(target, draft):
    result = invoke("doctor", "--target", target, "--draft", draft, "--json")
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert document["problem"] is None and document["torch"] == torch.__version__
    assert document["devices"]["cpu"]["dtypes"]["float32"] == "ok"
    for role, context in (("target", 96), ("draft", 64)):
        model = document[role]
        assert model["context"] == context and model["vocabulary"] == BYTES
        assert model["attention"].keys() == {"ragged", "pad", "split", "eager"}
        assert model["attention"][model["path"]] == "ok"
        assert model["kv_bytes_per_position"] == 2 * 2 * 2 * 8 * 4  # K and V; layers, KV heads, dimensions; float32
        assert model["kv_bytes_per_row"] == context * 256
    assert str(BYTES) in document["tokenizers"]
    assert document["draft_length"] == "FixedLength(k=5)"
    assert "not measured on this device" in words(invoke("doctor", "-t", target, "-d", draft).stdout)


def test_doctor_explains_an_unsupported_attention_path(tmp_path):
    folder = save(tmp_path, architecture="falcon")  # bypasses the attention interface
    result = invoke("doctor", "--target", folder, "--json")
    document = json.loads(result.stdout)
    assert result.exit_code == 0 and document["draft"] is None
    assert document["target"]["path"] == "eager"
    assert "cannot be decoded over a ragged cache" in document["target"]["attention"]["pad"]
    assert "n-gram lookup" in invoke("doctor", "--target", folder).stdout


def test_doctor_describes_drafters_without_a_model(target):
    assert "SuffixDrafter longest=8 least=0.3" in words(invoke("doctor", "-t", target, "-d", "suffix").stdout)


def test_doctor_refuses_models_in_one_line(target, tmp_path):
    other = save(tmp_path / "other", byte_tokenizer(swap=(40, 50)))
    rwkv, bloom = (save(tmp_path / name, architecture=name) for name in ("rwkv", "bloom"))
    assert "no path works" in invoke("doctor", "-t", rwkv).stdout
    for arguments, reason in (
        (("--target", tmp_path / "nothing"), "cannot load"),
        (("--draft", "gpt2"), "without a target"),
        (("-t", target, "-d", other), "tokenizers differ"),
        (("-t", rwkv), "Rwkv"),
        (("-t", target, "-d", bloom), "Bloom"),
        (("-t", target, "-d", "layers:9"), "has only 2 layers; draft with fewer, got 9"),
        (("-t", target, "-d", target, "--quantize", "int3"), "quantize must be one of int8, int4"),
        (("-t", target, "-d", target, "--quantize", "drafts=int4"), "quantize must be one of int8, int4"),
    ):
        result = invoke("doctor", *arguments, "--json")
        assert result.exit_code == 1 and result.stderr.startswith("error: ") and result.stderr.count("\n") == 1
        assert reason in result.stderr and reason in json.loads(result.stdout)["problem"]


def test_ctrl_c_prints_the_rows_so_far(monkeypatch):
    def interrupted(pair, prompts, **options):
        out = generation.generate(pair, prompts, **options | {"max_new_tokens": 4})
        raise bass.Interrupted(replace(out, finish_reasons=["length", None]))

    monkeypatch.setattr(bass, "generate", interrupted)
    result = invoke("generate", PROMPT, PROMPT, "--max-new-tokens", NEW)
    assert result.exit_code == 130 and "row 1: prompt 1, sample 0 (interrupted)" in result.stdout
    assert "interrupted: the rows are incomplete" in result.stderr
    rows = json.loads(invoke("generate", PROMPT, PROMPT, "--json").stdout)["rows"]
    assert [row["finish_reason"] for row in rows] == ["length", None]


@pytest.fixture
def lessons(monkeypatch, tmp_path):
    built = []

    def execute(source):
        built.append(source.name)
        return nbformat.v4.new_notebook(cells=[nbformat.v4.new_markdown_cell(f"# {source.stem}")])

    monkeypatch.setattr(pages, "execute", execute)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notebooks").mkdir()
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "bass-hands-on"\n')
    for name in ("00_start.ipynb", "03_explorer.ipynb", "12_report.ipynb"):
        (tmp_path / "notebooks" / name).touch()
    return built


def test_all_or_the_named_notebooks_are_built(lessons):
    assert invoke("notebooks").exit_code == 0
    assert lessons == ["00_start.ipynb", "03_explorer.ipynb", "12_report.ipynb"]
    lessons.clear()
    built = [Path(line.removeprefix("open ")) for line in invoke("notebooks", "12", "3").stdout.splitlines()]
    assert lessons == [page.with_suffix(".ipynb").name for page in built] == ["03_explorer.ipynb", "12_report.ipynb"]
    assert all(page.exists() and page.with_suffix(".ipynb").exists() for page in built)


@pytest.mark.parametrize("command", ["demo", "notebooks"])
def test_unwritable_pages_are_refused_before_the_work(lessons, tmp_path, command):
    (tmp_path / "build").touch()
    refused = invoke(command)
    assert refused.exit_code == 2 and "cannot write into" in refused.stderr and refused.stdout == ""
    assert lessons == []


def test_other_projects_notebooks_are_not_executed(lessons, tmp_path):
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "mine"\n')
    refused = invoke("notebooks")
    assert refused.exit_code == 2 and "this folder has no lessons" in refused.stderr and lessons == []


@pytest.mark.slow
def test_demo_runs_outside_the_repository(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    result = invoke("demo", "--batch-size", "2")
    assert result.exit_code == 0, result.output
    assert "in the root of the repository" in result.stdout
    assert re.fullmatch(r"identical tokens: 2/2 \(greedy, float32\) · \d+\.\d×", result.stdout.splitlines()[-1])
    assert list(tmp_path.iterdir()) == []


def test_one_row_streams_and_its_summary_goes_to_standard_error():
    result = invoke("generate", PROMPT, "--max-new-tokens", NEW)
    expected = bass.generate(bass.load_pair(), PROMPT, max_new_tokens=NEW)
    assert result.exit_code == 0, result.output
    assert result.stdout == f"{PROMPT}{expected.texts[0]}\n"
    summary = expected.trace.summary()
    assert f"{summary['tokens']} tokens for 1 row in {summary['steps']} steps" in result.stderr
    assert "α = " in result.stderr and "tokens/s" in result.stderr


def test_options_reach_the_models_and_the_engine(target, draft):
    options = {"max_new_tokens": 16, "temperature": 1.3, "top_k": 60, "top_p": 0.95, "seed": 7, "draft_length": 2}
    options |= {"verification": "block", "attention": "split"}
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    result = invoke("generate", PROMPT, "-t", target, "-d", draft, *flags, "--dtype=float64", "--device=cpu")
    expected = bass.generate(bass.load_pair(target, draft, dtype="float64"), PROMPT, **options)
    assert result.stdout == f"{PROMPT}{expected.texts[0]}\n"


def test_json_is_one_document_with_the_rows_of_generate(target, draft):
    options = {"max_new_tokens": 5, "num_return_sequences": 2, "temperature": 1.0}
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    result = invoke("generate", "ab", "cd", "-t", target, "-d", draft, *flags, "--json")
    document = json.loads(result.stdout)
    out = bass.generate(bass.load_pair(target, draft), ["ab", "cd"], **options)
    assert document["prompts"] == ["ab", "cd"]
    assert document["rows"] == out.to_pandas().to_dict("records")
    assert document["summary"].keys() == out.trace.summary().keys()
    assert " tokens for 4 rows" in result.stderr
    regular = invoke("generate", "ab", "-t", target, "--max-new-tokens=4", "--draft-length=0", "--json")
    assert json.loads(regular.stdout)["summary"]["alpha"] is None


def test_sampling_options_are_noted_at_temperature_0(target):
    few = ("-t", target, "--max-new-tokens=2", "--draft-length=0")
    result = invoke("generate", PROMPT, *few, "--top-k=5", "--seed=9")
    assert result.exit_code == 0
    assert "note: without effect at temperature 0: --top-k, --seed" in result.stderr
    for flags in (["--top-k=5", "--temperature=1"], []):
        assert "note" not in invoke("generate", PROMPT, *few, *flags).stderr


def test_encoder_decoder_texts_are_printed_without_their_sources():
    source = 'def evens(numbers):\n    """Return the even numbers."""\n'
    shown = invoke("generate", "-t", "encoder_decoder", source, "--max-new-tokens=8", "--draft-length=0")
    out = bass.generate(bass.load_pair("encoder_decoder"), source, max_new_tokens=8, draft_length=0)
    assert shown.exit_code == 0 and shown.stdout == f"{out.texts[0]}\n"
    several = invoke("generate", "-t", "encoder_decoder", source, source, "--max-new-tokens=8", "--draft-length=0")
    assert several.exit_code == 0 and "Return the even numbers" not in several.stdout and out.texts[0] in several.stdout


@pytest.fixture
def chatting(tmp_path):
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}"
    return save(tmp_path / "chatting", tokenizer)


def test_chat_prints_the_answers_without_the_prompts(chatting):
    result = invoke("generate", "hello", "--target", chatting, "--max-new-tokens=8", "--chat")
    pair = bass.load_pair(chatting)
    expected = bass.generate(pair, [{"role": "user", "content": "hello"}], max_new_tokens=8)
    assert expected.texts == bass.generate(pair, "<user>hello", max_new_tokens=8).texts
    assert result.exit_code == 0 and result.stdout == f"{expected.texts[0]}\n"
    both = invoke("generate", "hello", "you", "-t", chatting, "--max-new-tokens=8", "--chat", "--json")
    assert json.loads(both.stdout)["prompts"][1] == [{"role": "user", "content": "you"}]


def test_a_file_holds_texts_and_conversations(chatting, tmp_path):
    asked = ["def f(x):\n", [{"role": "user", "content": "hello"}]]
    file = tmp_path / "mini"  # the name of a prompt set
    file.write_text(json.dumps({"prompt": asked[0]}) + "\n" + json.dumps({"messages": asked[1]}) + "\n")
    result = invoke("generate", "--input", file, "-t", chatting, "--max-new-tokens=6", "--json")
    document = json.loads(result.stdout)
    out = bass.generate(bass.load_pair(chatting), asked, max_new_tokens=6)
    assert document["prompts"] == asked and [row["text"] for row in document["rows"]] == out.texts
    shown = invoke("generate", "--input", file, "-t", chatting, "--max-new-tokens=6").stdout
    assert f"{asked[0]}{out.texts[0]}\n" in shown and f"(length)\n{out.texts[1]}\n" in shown


def test_several_rows_have_headings():
    result = invoke("generate", "ab", "cd", "--num-return-sequences=2", "--temperature=1", "--max-new-tokens=5")
    out = bass.generate(bass.load_pair(), ["ab", "cd"], num_return_sequences=2, temperature=1.0, max_new_tokens=5)
    expected = ""
    for row, (prompt, sample) in enumerate([(0, 0), (0, 1), (1, 0), (1, 1)]):
        heading = f"row {row}: prompt {prompt}, sample {sample} ({out.finish_reasons[row]})"
        expected += f"{heading}\n{['ab', 'cd'][prompt]}{out.texts[row]}\n\n"
    assert result.stdout == expected
    assert " tokens for 4 rows" in result.stderr


def test_prompt_comes_from_standard_input():
    piped = invoke("generate", "--max-new-tokens=8", "--draft-length=0", input=PROMPT)
    assert piped.exit_code == 0 and piped.stdout == invoke("generate", PROMPT, "--max-new-tokens=8").stdout
    assert "α" not in piped.stderr
    assert "utf-8" in invoke("generate", input=b"\xff").stderr


def test_missing_prompt_at_a_terminal_is_a_usage_error(monkeypatch):
    monkeypatch.setattr(decoding, "is_terminal", lambda stream: True)
    result = invoke("generate")
    assert result.exit_code == 2
    assert "Usage" in result.stderr and "give a prompt" in result.stderr


def test_stop_string_is_not_printed():
    arguments = ("generate", PROMPT, "--max-new-tokens", NEW)
    text = invoke(*arguments).stdout.removeprefix(PROMPT)
    stop = text[6:10]
    assert invoke(*arguments, "--stop", stop).stdout == f"{PROMPT}{text[: text.index(stop)]}\n"


def test_accepted_tokens_are_coloured_in_a_terminal_only(monkeypatch, target, draft):
    arguments = ("generate", PROMPT, "--target", target, "--draft", draft, "--max-new-tokens=24", "--show-accepted")
    plain = invoke(*arguments, color=True)
    assert "\x1b" not in plain.stdout
    monkeypatch.setattr(decoding, "is_terminal", lambda stream: True)
    shown = invoke(*arguments, color=True)
    assert shown.exit_code == 0, shown.output
    assert all(f"\x1b[{code}m" in shown.stdout for code in (31, 32, 36))  # recovered, accepted, bonus
    assert "accepted" in shown.stderr and "recovered" in shown.stderr
    assert plain.stdout.strip() in invoke(*arguments).stdout  # the same text under the colours


def test_models_are_quantized_by_name(target, draft):
    result = invoke("doctor", "-t", target, "-d", draft, "--quantize", "draft=int4,target=int8", "--json")
    document = json.loads(result.stdout)
    assert [document[role]["weights"] for role in ("target", "draft")] == ["int8", "int4"]
    assert document["draft"]["weight_bytes"] < 4 * document["draft"]["parameters"]
