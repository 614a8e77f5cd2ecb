"""Records: where they lie, what their lines may hold by the JSON schema, and what is said of lines that are wrong."""

import json

import gpu_box
import jsonschema
import pytest
import record_lines
import records_page

import bass_lab as lab
from bass_lab.measure import gpu_benchmark, record_schema, records
from bass_lab.measure.gpu_plan import DRY

LINE = json.loads((records.SHIPPED / "embedded_cpu.jsonl").read_text().splitlines()[0])


def lines_of(path):
    return map(json.loads, path.read_text(encoding="utf-8").splitlines())


def test_every_line_that_ships_is_of_its_kind():
    paths = sorted(records.SHIPPED.rglob("*.jsonl"))
    kinds = {path.name: {record_lines.kind_of(line) for line in lines_of(path)} for path in paths}
    assert kinds["embedded_cpu.jsonl"] == kinds["records.jsonl"] == {"speed"}
    assert kinds["batched.jsonl"] == {"evaluation", "samples"}


def test_lines_of_gpus_are_of_their_kinds():
    (line,) = gpu_box.decode_lines([DRY])[:1]
    assert record_lines.kind_of(line) == "gpu_speed"
    failed = {name: line[name] for name in record_schema.required("gpu_failure") if name in line}
    failed |= {"schema": "gpu_failure", "reason": "out of memory"}
    assert record_lines.kind_of(failed) == "gpu_failure"
    gpu_benchmark.check(failed)
    pytest.importorskip("triton")  # the kernel benchmark's cases are made by its own code
    assert {record_lines.kind_of(line) for line in gpu_box.kernel_lines()} == {"kernel"}


@pytest.mark.parametrize("field", record_schema.required("speed"))
def test_both_validators_miss_a_field_that_is_missing(field):
    lacking = {name: value for name, value in LINE.items() if name != field}
    with pytest.raises(ValueError, match=f"'{field}' is missing"):
        records.check(lacking)
    with pytest.raises(jsonschema.ValidationError):
        record_lines.validator().validate(lacking)


def test_a_kind_that_nobody_knows_is_refused_with_those_that_are(tmp_path):
    path = tmp_path / "lines.jsonl"
    path.write_text(json.dumps(LINE | {"schema": "sped"}) + "\n")
    with pytest.raises(ValueError, match=r"lines.jsonl, line 1: schema must be one of speed, .*stage; got 'sped'"):
        lab.load_records(path)
    with pytest.raises(ValueError, match="schema must be one of gpu_speed, gpu_failure; got 'speed'"):
        gpu_benchmark.check(LINE)


def test_lines_without_a_kind_are_read_as_they_are(tmp_path):
    path = tmp_path / "lines.jsonl"
    path.write_text('{"size": 1, "prompt_set": "mine"}\n')
    assert lab.load_records(path).prompt_set.tolist() == ["mine"]


def test_the_page_shows_the_schema():
    told = "PYTHONPATH=.:kernels:tests/support python tests/support/records_page.py writes it anew"
    assert records_page.PAGE.read_text(encoding="utf-8") == records_page.page(), told


def test_every_field_has_a_meaning():
    for kind, schema in record_schema.kinds().items():
        for name, part in schema["properties"].items():
            assert part["description"].endswith("."), f"{kind}.{name}"


# --- where they lie ---


@pytest.mark.parametrize(
    "content", [b"my precious notes, one line", b"notes\nhalf", b"PK\x03\x04\x00\n\x00\x01", b'{\n "a": 1}']
)
def test_a_file_of_another_kind_is_left_as_it_is(tmp_path, content):
    path = tmp_path / "notes.txt"
    path.write_bytes(content)
    for change in (records.mend, lambda path: records.append(path, [{"a": 1}], check=lambda line: None)):
        with pytest.raises(ValueError, match="something else than records; it is left as it is, give another file"):
            change(path)
    assert path.read_bytes() == content


@pytest.mark.parametrize("half", [b"", b"{", b'{"', b'{"a": 1, "b'])
@pytest.mark.parametrize("before", [b"", b'{"a": 1}\n'])
def test_half_a_record_goes(tmp_path, before, half):
    path = tmp_path / "records.jsonl"
    path.write_bytes(before + half)
    records.mend(path)
    assert path.read_bytes() == before


def test_records_are_found_from_any_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("BASS_RECORDS", raising=False)
    assert records.shipped("embedded_cpu.jsonl").is_file() and records.shipped("latency_sweep").is_dir()
    assert len(lab.load_records()) > 1000


def test_another_folder_can_be_named_and_what_it_lacks_is_said(tmp_path, monkeypatch):
    (tmp_path / "mine.jsonl").write_text(json.dumps(LINE) + "\n")
    monkeypatch.setenv("BASS_RECORDS", str(tmp_path))
    assert len(lab.load_records()) == 1
    said = rf"there is no embedded_cpu.jsonl in {tmp_path}, the folder that BASS_RECORDS names; it holds mine.jsonl"
    with pytest.raises(FileNotFoundError, match=said):
        records.shipped("embedded_cpu.jsonl")
