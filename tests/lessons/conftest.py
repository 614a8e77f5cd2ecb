"""What the tests of several lessons share."""

import gpu_box
import lesson_runs
import pytest

import bass_core as bass
from bass_lab.gpu import stages


@pytest.fixture(scope="session")
def pair():
    """The embedded pair in float32. No test changes it."""
    return bass.load_pair(dtype="float32")


@pytest.fixture(scope="session")
def recorded(tmp_path_factory):
    """A folder of records: those that ship and all that a GPU would have recorded, made up."""
    pytest.importorskip("triton")  # the kernel benchmark's cases are made by its own code
    folder = lesson_runs.without_gpus(tmp_path_factory.mktemp("recorded") / "records")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BASS_RECORDS", str(folder))
        stages.collect(gpu_box.write(folder.parent / "box"))
    return folder


@pytest.fixture(scope="session")
def unrecorded(tmp_path_factory):
    """A folder of records: those that ship but for any of a GPU."""
    return lesson_runs.without_gpus(tmp_path_factory.mktemp("unrecorded") / "records")
