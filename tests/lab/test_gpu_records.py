import json

import gpu_box
import pytest

from bass_core.policies.costs import CostModel
from bass_lab.gpu import recorded, stages
from bass_lab.gpu.recorded import gpu_record
from bass_lab.measure import records
from bass_lab.measure.plan import DRY, PEERS, REGULAR, Group, plan
from bass_lab.measure.profiling import Profile

pytest.importorskip("triton")  # the benchmark's code makes the cases

EIGHT = Group("paper-7.8b", 8, (REGULAR,))


@pytest.fixture
def collected(tmp_path, monkeypatch):
    box = gpu_box.write(tmp_path / "box")
    assert {path.name for path in box.iterdir()} == {name for stage in stages.STAGES.values() for name in stage.files}
    folder = tmp_path / "records"
    folder.mkdir()
    monkeypatch.setenv("BASS_RECORDS", str(folder))
    stages.collect(box)
    return folder


def save(folder, name, lines):
    records.append(folder / name, lines)


@pytest.mark.parametrize("kind", recorded.READERS)
def test_collected_record_is_found_and_names_its_source(collected, kind):
    found = gpu_record(kind, collected)
    assert found.device == gpu_box.DEVICE and found.name == "X1 Example (recorded)"
    assert str(found).startswith("Recorded on NVIDIA X1 Example: bfloat16, torch 2.99.0, commit abcdef123456")
    assert ("synthetic" in str(found)) == (kind == "gpu")
    assert list(collected.glob(f"{kind}_x1_example.*"))


def test_missing_record_is_none(tmp_path):
    (tmp_path / "costs_check_x.jsonl").write_text("{}\n")  # a check of costs, no costs
    for kind in recorded.READERS:
        assert gpu_record(kind, tmp_path) is None and gpu_record(kind, tmp_path / "nowhere") is None
    with pytest.raises(ValueError, match="no line"):
        stages.collect(tmp_path / "nowhere")


def test_contents_equal_the_files(collected):
    assert isinstance(gpu_record("costs", collected).content, CostModel)
    assert isinstance(gpu_record("timeline", collected).content, Profile)
    kernels = gpu_record("kernels", collected)
    assert set(kernels.content.kernel) == {"ragged", "flex"} and kernels.content.us.gt(0).all()
    assert kernels.failed == len(kernels.content) / 2  # the failing kernel
    assert f"{kernels.failed} cases have a reason instead of a time" in str(kernels)
    ways = gpu_record("gpu", collected).content
    assert len(ways) == sum(len(group.ways) for group in [*plan(quick=True), *PEERS])
    assert set(ways.method) == {"regular", "batched", "single", "transformers"} and ways.exact.all()


def test_runs_on_a_cpu_are_no_records_of_a_gpu(tmp_path):
    gpu_box.costs(device_type="cpu").save(tmp_path / "costs_a.json")
    gpu_box.profile(tmp_path, device_type="cpu").save(tmp_path / "timeline_a.json.gz")
    save(tmp_path, "kernels_a.jsonl", gpu_box.kernel_lines("cpu"))
    save(tmp_path, "gpu_a.jsonl", gpu_box.decode_lines([DRY]))
    assert [gpu_record(kind, tmp_path) for kind in recorded.READERS] == [None] * 4
    save(tmp_path, "gpu_b.jsonl", gpu_box.decode_lines([EIGHT]))
    assert len(gpu_record("gpu", tmp_path).content) == 1  # one line of the next file


def test_last_measurement_counts(tmp_path):
    first, again = (gpu_box.decode_lines([EIGHT], tokens_per_second=speed) for speed in (100.0, 200.0))
    save(tmp_path, "gpu_x.jsonl", first + again)
    save(tmp_path, "peers_y.jsonl", gpu_box.decode_lines(PEERS))  # another GPU: not joined
    assert gpu_record("gpu", tmp_path).content.tokens_per_second.tolist() == [200]
    line = {name: first[0][name] for name in records.kinds()["gpu_failure"]["required"] if name != "reason"}
    save(tmp_path, "gpu_x.jsonl", [line | {"schema": "gpu_failure", "reason": "out of memory"}])
    assert gpu_record("gpu", tmp_path) is None  # no timed line is left
    save(tmp_path, "peers_x.jsonl", gpu_box.decode_lines(PEERS))
    found = gpu_record("gpu", tmp_path)
    assert found.failed == 1 and set(found.content.method) == {"transformers"}


def test_wrong_file_is_refused_by_name(tmp_path):
    (tmp_path / "gpu_x.jsonl").write_text(json.dumps(gpu_box.decode_lines([EIGHT])[0] | {"batch": 0}) + "\n")
    with pytest.raises(ValueError, match=r"gpu_x.jsonl, line 1: batch must be positive"):
        gpu_record("gpu", tmp_path)
    (tmp_path / "costs_x.json").write_text("{}")
    with pytest.raises(ValueError, match=r"costs_x.json holds no costs"):
        gpu_record("costs", tmp_path)
    with pytest.raises(ValueError, match="kind must be one of costs, timeline, kernels, gpu"):
        gpu_record("speed")


def test_shipped_records_of_gpus_are_read(collected):
    for kind in recorded.READERS:
        gpu_record(kind, records.SHIPPED)
    assert not any(map(gpu_box.of_a_stage, records.SHIPPED.glob("*embedded_cpu.jsonl")))  # written by `bass bench`
    assert all(map(gpu_box.of_a_stage, collected.iterdir()))
    for path in collected.glob("peers_*.jsonl"):
        path.write_text(path.read_text().replace('"batch": 32', '"batch": 0'))
    with pytest.raises(ValueError, match="batch must be positive"):
        gpu_record("gpu", collected)
