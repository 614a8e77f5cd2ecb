"""What the tests of several lessons share."""

import pytest

import bass_core as bass


@pytest.fixture(scope="session")
def pair():
    """The embedded pair in float32. No test changes it."""
    return bass.load_pair(dtype="float32")
