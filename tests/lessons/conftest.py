import gpu_box
import lesson_runs
import pytest

import bass_core as bass
from bass_lab.gpu import stages


@pytest.fixture(scope="session")
def pair():
    return bass.load_pair(dtype="float32")


@pytest.fixture(scope="session")
def recorded(tmp_path_factory):
    """Return a folder with the shipped records and invented records of a GPU."""
    pytest.importorskip("triton")  # the kernel benchmark's code makes its cases
    folder = lesson_runs.without_gpus(tmp_path_factory.mktemp("recorded") / "records")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BASS_RECORDS", str(folder))
        stages.collect(gpu_box.write(folder.parent / "box"))
    return folder


@pytest.fixture(scope="session")
def unrecorded(tmp_path_factory):
    """Return a folder with the shipped records, except a GPU's."""
    return lesson_runs.without_gpus(tmp_path_factory.mktemp("unrecorded") / "records")
