"""The sandboxed process: receive a program, drop all privileges, execute the program, and answer calls.

The checker trusts nothing from this process. The program may therefore patch anything here.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import resource
import sys

import values
from channel import Channel, ChannelError
from confinement import die_with, drop_root, no_new_privileges, refuse_calls, restrict_files

LIMITS = {"AS": 2**29, "NPROC": 1, "CPU": 4, "FSIZE": 2**20, "NOFILE": 32, "CORE": 0, "SIGPENDING": 0}
# Modules to import before confinement if the program's text contains the name. After confinement, the system's shared
# libraries are not readable, nor is the standard library of an interpreter in a private home folder.
IMPORTED = frozenset(
    re.findall(
        r"\w+",
        "abc array base64 binascii bisect bz2 calendar cmath collections contextlib copy csv ctypes dataclasses "
        "datetime decimal difflib enum fractions functools gc hashlib heapq html inspect io itertools json keyword "
        "lzma math numbers operator os pickle pprint queue random re secrets signal socket sqlite3 ssl statistics "
        "string struct subprocess sys textwrap threading time traceback types typing unicodedata urllib uuid warnings "
        "weakref xml zlib",
    )
)
LATER = {  # submodules that these modules import at first use
    "collections": "collections.abc",
    "datetime": "_strptime",
    "urllib": "urllib.parse",
    "xml": "xml.etree.ElementTree",
}


def main(read: int, write: int, parent: int) -> None:
    """Serve the checker. read, write: the pipes to the checker. parent: process id of the checker."""
    channel = Channel(read, write)
    try:
        message = json.loads(channel.receive())
        import_mentioned(message["program"])
        lacking = confine(parent)
        channel.send({"nonce": message["nonce"], "lacking": lacking})
        if not lacking or message["unsafe"]:
            answer(channel, message["program"], message["entry_point"])
    except ChannelError:  # the checker has ended
        pass
    os._exit(0)


def import_mentioned(program: str) -> None:
    for name in IMPORTED.intersection(re.findall(r"\w+", program)):
        with contextlib.suppress(ImportError):  # the interpreter was built without this module
            __import__(name)
            __import__(LATER.get(name, name))


def confine(parent: int) -> list[str]:
    """Apply all measures, in a fixed order: some need privileges that later measures drop. Return the failures."""
    measures = {
        "limits": limit,
        "no_new_privs": no_new_privileges,
        "Landlock": restrict_files,
        "another uid than root's": drop_root,
        "PR_SET_PDEATHSIG": lambda: die_with(parent),
        "seccomp": refuse_calls,
    }
    lacking = []
    for name, measure in measures.items():
        try:
            measure()
        except (OSError, ValueError, AttributeError) as error:  # AttributeError: the system lacks the call
            lacking.append(f"{name}: {error}")
    return lacking


def limit() -> None:
    for name, most in LIMITS.items():
        kind = getattr(resource, f"RLIMIT_{name}")
        hard = resource.getrlimit(kind)[1]
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(kind, (most, most))


def answer(channel: Channel, program: str, entry_point: str) -> None:
    """Process messages: load the program, or call the entry point."""
    module = type(sys)("candidate")
    sys.modules[module.__name__] = module  # for dataclasses and pickle
    while True:
        message = json.loads(channel.receive())
        reply = {"nonce": message["nonce"], "value": None}
        try:
            if "args" in message:
                args, kwargs = values.decode(message["args"]), values.decode(message["kwargs"])
                reply["value"] = values.encode(getattr(module, entry_point)(*args, **kwargs))
            else:
                exec(compile(program, "<program>", "exec"), module.__dict__)
                getattr(module, entry_point)
        except BaseException as error:  # including SystemExit
            reply = {"nonce": message["nonce"], "raised": [type(error).__name__, str(error)[:200]]}
        channel.send(reply)
