"""Grade programs in a trusted process, which the harness kills if a check does not end.

The check runs in this process, and the program in the sandbox. The program receives the arguments of each call but no
expected values, so only correct return values pass.
"""

from __future__ import annotations

import builtins
import contextlib
import json
import os
import resource
import signal
import subprocess
import time
from types import TracebackType

import bare
import values
from channel import Channel, ChannelError
from confinement import die_with

CPU_SECONDS = 4  # limit of the worker
MOST_MEMORY = 2**31  # bytes; a hostile result must not make the check fill the machine's memory
MOST_TEXT = 200
ENDS_LOOPS = (StopIteration, StopAsyncIteration)  # would end `all(map(candidate, ...))` early with True
SIGNALS = {each.value: each.name for each in signal.Signals}


def main(read: int, write: int, parent: int) -> None:
    """Grade jobs until the harness closes the pipe. parent: process id of the harness."""
    harness = Channel(read, write)
    try:
        try:
            die_with(parent)
            resource.setrlimit(resource.RLIMIT_AS, (MOST_MEMORY, MOST_MEMORY))
        except ProcessLookupError:
            os._exit(1)
        except (OSError, ValueError):  # not Linux: the harness runs here only with unsafe=True
            pass
        harness.send({"ready": True})
        while True:
            harness.send(grade(json.loads(harness.receive())))
    except ChannelError:
        os._exit(0)


def grade(job: dict) -> dict:
    """Return {"passed", "reason"}, or {"lacking"} for an incomplete sandbox, or {"fault"} for a broken check."""
    program = Program(job)
    try:
        if (lacking := program.start(job["prompt"] + job["completion"])) and not job["unsafe"]:
            return {"lacking": lacking}
        try:
            check = load_check(job, program.call)
        except Exception as error:
            return {"fault": f"{type(error).__name__}: {error}"}
        program.ask({})  # load it
        check(program.call)
        program.finish()
        return {"passed": True, "reason": "passed"}
    except BaseException as error:
        if program.broken:
            why = program.broken
        elif error is program.raised:
            why = f"error: {program.raised_as}"
        else:
            why = reason(error, job["test"])
        return {"passed": False, "reason": printable(why)}
    finally:
        program.stop()


def load_check(job: dict, candidate) -> object:
    """Return the dataset's `check`. Globals: the prompt's helpers, and as the entry point the sandboxed candidate."""
    scope = {"__name__": "check"}
    exec(job["prompt"] + "    pass\n", scope)
    scope[job["entry_point"]] = candidate
    exec(compile(job["test"], "<check>", "exec"), scope)
    return scope["check"]


def reason(error: BaseException, test: str) -> str:
    """Return the reason for an error in the check: the line that failed."""
    line = _line(error.__traceback__, test)
    if isinstance(error, AssertionError):
        return f"wrong: {line}" + (f": {error}" if error.args else "")
    return f"error: {line}: {type(error).__name__}: {error}"


def _line(traceback: TracebackType | None, test: str) -> str:
    line = ""
    while traceback:
        if traceback.tb_frame.f_code.co_filename == "<check>":
            line = test.split("\n")[traceback.tb_lineno - 1].strip()
        traceback = traceback.tb_next
    return line


def printable(text: str) -> str:
    return "".join(character if character.isprintable() else " " for character in text[:MOST_TEXT])


class Program:
    """The program in the sandbox. Every request has a fresh random number that the reply must repeat."""

    def __init__(self, job: dict) -> None:
        self._job = job
        self._deadline = time.monotonic() + job["seconds"]
        self._cpu = _children_seconds()
        self._process, *pipes = bare.start("_worker")
        self._channel = Channel(*pipes)
        self.raised: BaseException | None = None  # exception of the last call
        self.raised_as = ""  # type and text of this exception in the program
        self.broken = ""  # reason of a sandbox failure; stays set even if the check catches the error

    def start(self, text: str) -> list[str]:
        """Send the program's text without executing it. Return what the sandbox lacks."""
        job = {"program": text, "entry_point": self._job["entry_point"], "unsafe": self._job["unsafe"]}
        return self._exchange(job)["lacking"]

    def call(self, *args: object, **kwargs: object) -> object:
        """Call the program as the candidate of `check`. Arguments and results go by value; exceptions are re-raised."""
        return self.ask({"args": values.encode(list(args)), "kwargs": values.encode(kwargs)})

    def ask(self, message: dict) -> object:
        reply = self._exchange(message)
        try:
            if "value" in reply:
                return values.decode(reply["value"])
            name, text = map(str, reply["raised"])
            kind = getattr(builtins, name, None)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            self._break("error: the reply is not a value")
        self.raised_as = f"{name}: {text}"
        try:
            catchable = issubclass(kind, Exception) and not issubclass(kind, ENDS_LOOPS)
            self.raised = kind(text) if catchable else RuntimeError(self.raised_as)
        except TypeError:  # not a class, or a class with other arguments
            self.raised = RuntimeError(self.raised_as)
        raise self.raised

    def finish(self) -> None:
        """Raise ChannelError after a sandbox failure, or for an unexpected reply."""
        if self.broken:
            raise ChannelError(self.broken)
        if self._channel.pending():
            self._break("error: an unexpected reply")

    def stop(self) -> None:
        bare.stop(self._process)
        self._channel.close()

    def _exchange(self, message: dict) -> dict:
        """Return the reply to a message. Any failure marks the sandbox as broken."""
        self.finish()
        nonce = os.urandom(8).hex()
        try:
            self._channel.send({"nonce": nonce} | message, self._deadline)
            reply = json.loads(self._channel.receive(self._deadline))
        except ChannelError as error:
            self._break(self._death() if str(error) == "died" else str(error))
        except (ValueError, RecursionError):
            self._break("error: the reply is not JSON")
        if type(reply) is not dict or reply.get("nonce") != nonce:
            self._break("error: a reply to another request")
        return reply

    def _break(self, why: str) -> None:
        self.broken = self.broken or why
        raise ChannelError(self.broken)

    def _death(self) -> str:
        """Return a description of the worker's end, for the report."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(0.2)  # the pipe closes shortly before the process ends
        if self._process.returncode is None:
            return "error: the program closed its pipe"
        status = self._process.returncode
        if _children_seconds() - self._cpu > 0.9 * CPU_SECONDS:
            return f"timeout: {CPU_SECONDS} s of CPU time"
        return f"died: {SIGNALS.get(-status, -status)}" if status < 0 else f"died: exit status {status}"


def _children_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
