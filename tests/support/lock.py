"""Write requirements.lock: the files (by hash) that pip installs for constraints.txt on this kind of machine.

.venv/bin/python tests/support/lock.py, on Linux (x86-64), with Python 3.11 and PyTorch's CPU build.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
HEADER = """\
# The files of constraints.txt by hash, for Linux (x86-64), Python 3.11 and PyTorch's CPU build: `make … LOCKED=1`
# installs these and no others. Written by tests/support/lock.py.
"""


def main() -> None:
    pins = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    with tempfile.NamedTemporaryFile() as report:
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed", "--no-deps"]
        subprocess.run([*pip, "--report", report.name, *pins], check=True)
        found = json.load(report)["install"]
    hashes = {
        canonicalize_name(file["metadata"]["name"]): file["download_info"]["archive_info"]["hashes"]["sha256"]
        for file in found
    }
    lines = [f"{pin} --hash=sha256:{hashes[canonicalize_name(pin.split('==')[0])]}\n" for pin in pins]
    (ROOT / "requirements.lock").write_text(HEADER + "".join(lines))


if __name__ == "__main__":
    main()
