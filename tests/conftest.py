"""Shared fixtures. Tests run on CPU with two threads, offline, in a fixed order of seeds."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
