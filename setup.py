"""Editable installs put folders on sys.path. Type checkers do not follow setuptools' default, an import hook."""

from contextlib import nullcontext
from pathlib import Path

from setuptools import setup
from setuptools.command.editable_wheel import editable_wheel

ROOT = Path(__file__).resolve().parent


class Folders(nullcontext):
    """The strategy of an editable install: one file of paths."""

    def __enter__(self):
        return self

    def __call__(self, wheel, files, mapping):
        wheel.writestr("__editable__.bass_hands_on.pth", f"{ROOT}\n{ROOT / 'kernels'}\n")


class EditableWheel(editable_wheel):
    def _select_strategy(self, name, tag, build_lib):  # a setuptools without this method falls back on its hook
        return Folders()


setup(cmdclass={"editable_wheel": EditableWheel})
