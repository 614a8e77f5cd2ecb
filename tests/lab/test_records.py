import json

import gpu_box
import jsonschema
import pytest
import record_lines
import records_page

import bass_lab as lab
from bass_lab.gpu import decoding
from bass_lab.measure import records
from bass_lab.measure.plan import DRY

LINE = json.loads((records.SHIPPED / "embedded_cpu.jsonl").read_text().splitlines()[0])


def lines_of(path):
    return map(json.loads, path.read_text(encoding="utf-8").splitlines())


def test_shipped_lines_follow_the_schema():
    paths = sorted(records.SHIPPED.rglob("*.jsonl"))
    kinds = {path.name: {record_lines.kind_of(line) for line in lines_of(path)} for path in paths}
    assert kinds["embedded_cpu.jsonl"] == kinds["records.jsonl"] == {"speed"}
    assert kinds["batched.jsonl"] == {"evaluation", "samples"}


def test_lines_of_gpus_follow_the_schema():
    (line,) = gpu_box.decode_lines([DRY])[:1]
    assert record_lines.kind_of(line) == "gpu_speed"
    failed = {name: line[name] for name in records.kinds()["gpu_failure"]["required"] if name in line}
    failed |= {"schema": "gpu_failure", "reason": "out of memory"}
    assert record_lines.kind_of(failed) == "gpu_failure"
    pytest.importorskip("triton")  # the benchmark's code makes the cases
    assert {record_lines.kind_of(line) for line in gpu_box.kernel_lines()} == {"kernel"}


def test_missing_field_is_refused_by_both_validators():
    for field in records.kinds()["speed"]["required"]:
        lacking = {name: value for name, value in LINE.items() if name != field}
        with pytest.raises(ValueError, match=f"'{field}' is missing"):
            records.check(lacking)
        with pytest.raises(jsonschema.ValidationError):
            record_lines.validator().validate(lacking)


def test_unknown_kind_is_refused_with_the_known(tmp_path):
    path = tmp_path / "lines.jsonl"
    path.write_text(json.dumps(LINE | {"schema": "sped"}) + "\n")
    with pytest.raises(ValueError, match=r"lines.jsonl, line 1: schema must be one of speed, .*stage; got 'sped'"):
        lab.load_records(path)
    with pytest.raises(ValueError, match="schema must be one of gpu_speed, gpu_failure; got 'speed'"):
        records.check(LINE, *decoding.KINDS)


SAMPLES = '{"evaluation": {}, "environment": {}}\n'


@pytest.mark.parametrize("first", ["", '{"size": 1}\n', SAMPLES], ids=["first line", "records", "samples"])
@pytest.mark.parametrize("damaged", [b"\xff", b'{"size": "\xff"}', b"[" * 100_000, b"{", b"3"])
def test_damaged_line_is_named(tmp_path, first, damaged):
    path = tmp_path / "lines.jsonl"
    path.write_bytes(first.encode() + damaged + b"\n")
    with pytest.raises(ValueError, match=rf"lines\.jsonl, line {1 + bool(first)}( is no|:)"):
        lab.load_records(path)


def test_file_reached_twice_counts_once(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "lines.jsonl").write_text('{"size": 1, "prompt_set": "mine"}\n')  # an unknown kind
    (tmp_path / "linked.jsonl").symlink_to(tmp_path / "real" / "lines.jsonl")
    (tmp_path / "real" / "above").symlink_to(tmp_path)
    (tmp_path / "twin").symlink_to(tmp_path / "real")
    assert lab.load_records(tmp_path).prompt_set.tolist() == ["mine"]


SETTINGS = {"batch", "k", "max_new_tokens", "temperature", "seed", "repeats", "cores", "alpha", "context", "rows"}
SETTINGS |= {"requests", "new_tokens", "max_batch_size", "heads", "kv_heads", "head_dim", "query_length", "kv_length"}
SETTINGS |= {"total_kv", "columns", "inputs", "draws"}  # numbers that are not measured


def test_every_number_is_a_metric_with_a_unit_or_a_setting():
    for schema in records.kinds().values():
        for name, part in schema["properties"].items():
            number = any(kind in part.get("type", "") for kind in ("number", "integer"))
            assert "unit" in part or not number or name in SETTINGS, name
            assert part.get("better") in (None, "higher", "lower") and ("unit" in part or "better" not in part)


def test_page_shows_the_schema():
    told = "PYTHONPATH=.:kernels:tests/support python tests/support/records_page.py writes it anew"
    assert records_page.PAGE.read_text(encoding="utf-8") == records_page.page(), told


def test_every_field_has_a_meaning():
    for kind, schema in records.kinds().items():
        for name, part in schema["properties"].items():
            assert part["description"].endswith("."), f"{kind}.{name}"


def test_only_half_a_record_is_removed(tmp_path):
    path = tmp_path / "notes.txt"
    for content in (b"my precious notes, one line", b"notes\nhalf", b"PK\x03\x04\x00\n\x00\x01", b'{\n "a": 1}'):
        path.write_bytes(content)
        for change in (records.mend, lambda path: records.append(path, [{"a": 1}], check=lambda line: None)):
            with pytest.raises(ValueError, match="does not hold records and was not changed; give another file"):
                change(path)
        assert path.read_bytes() == content
    for before in (b"", b'{"a": 1}\n'):
        for half in (b"", b"{", b'{"', b'{"a": 1, "b'):
            path.write_bytes(before + half)
            records.mend(path)
            assert path.read_bytes() == before


def test_records_folder_is_the_package_or_the_environments(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("BASS_RECORDS", raising=False)
    assert records.shipped("embedded_cpu.jsonl").is_file() and records.shipped("latency_sweep").is_dir()
    table = lab.load_records()
    assert len(table) > 1000
    speeds = table[table.source == "embedded_cpu.jsonl"]
    assert len(speeds) == len(records.shipped("embedded_cpu.jsonl").read_text().splitlines())
    assert (speeds.identical == speeds.rows).all() and speeds.over_regular.notna().all()
    assert "quality_embedded_cpu/single.jsonl" in set(table.source)
    with pytest.raises(FileNotFoundError):
        lab.load_records("nowhere")
    (tmp_path / "mine.jsonl").write_text(json.dumps(LINE) + "\n")
    monkeypatch.setenv("BASS_RECORDS", str(tmp_path))
    assert len(lab.load_records()) == 1
    said = rf"there is no embedded_cpu.jsonl in {tmp_path}, the folder that BASS_RECORDS names; it holds mine.jsonl"
    with pytest.raises(FileNotFoundError, match=said):
        records.shipped("embedded_cpu.jsonl")
