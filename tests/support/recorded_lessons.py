"""An IPython startup file that makes kernels capture steps as on a GPU.

Under an oracle for random numbers, the small models of an enumeration stay on the CPU.
"""

import os
from pathlib import Path

MARK = "recorded"  # a file that exists once a session in a kernel has captured steps
STARTUP = f"""\
import sys

sys.path.insert(0, {str(Path(__file__).parent)!r})
import recorded_lessons

recorded_lessons.begin()
"""


def put(folder: Path) -> dict[str, str]:
    """Write the startup file. Return the environment variables for kernels."""
    startup = folder / "profile_default" / "startup"
    startup.mkdir(parents=True)
    (startup / "record.py").write_text(STARTUP)
    return {"IPYTHONDIR": str(folder)}


def begin() -> None:
    import pytest
    from recording import use_on_cpu

    from bass_core import session
    from bass_core.exactness import randomness

    asked, accept = session.execution, randomness.accept
    use_on_cpu(pytest.MonkeyPatch())
    as_on_a_gpu = session.execution

    def execution(*given):
        way = (as_on_a_gpu if randomness.accept is accept else asked)(*given)
        if way.recorded:
            Path(os.environ["IPYTHONDIR"], MARK).touch()
        return way

    session.execution = execution
