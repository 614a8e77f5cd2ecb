"""Grades programs, in a process of its own beside the harness: trusted, and killed when a check does not end.

The check runs here and the program in the sandbox. The program gets the arguments of one call after another and never
sees an expected value, so it can pass only by giving back right values.
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

CPU_SECONDS = 4  # the worker's limit
MOST_MEMORY = 2**31  # a check may not fill the machine with what a result makes it build
MOST_TEXT = 200
ENDS_LOOPS = (StopIteration, StopAsyncIteration)  # `all(map(candidate, ...))` would end early, and be true
SIGNALS = {each.value: each.name for each in signal.Signals}


def main(read: int, write: int, parent: int) -> None:
    """Grade the jobs that come from the harness, whose process is `parent`, until it closes the pipe."""
    harness = Channel(read, write)
    try:
        try:
            die_with(parent)
            resource.setrlimit(resource.RLIMIT_AS, (MOST_MEMORY, MOST_MEMORY))
        except ProcessLookupError:
            os._exit(1)
        except (OSError, ValueError):  # not Linux: the harness has refused to run there unless told otherwise
            pass
        harness.send({"ready": True})
        while True:
            harness.send(grade(json.loads(harness.receive())))
    except ChannelError:
        os._exit(0)


def grade(job: dict) -> dict:
    """{"passed", "reason"}; or {"lacking"}: what the sandbox could not do; or {"fault"}: what is wrong with a check."""
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
    """The dataset's `check`; its names are the prompt's helpers and, as the entry point, the sandboxed candidate."""
    scope = {"__name__": "check"}
    exec(job["prompt"] + "    pass\n", scope)
    scope[job["entry_point"]] = candidate
    exec(compile(job["test"], "<check>", "exec"), scope)
    return scope["check"]


def reason(error: BaseException, test: str) -> str:
    """Why the check ended with an error of its own: the line that failed."""
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
    """The program in its sandbox: one question, one answer, each with a number that the program cannot know before."""

    def __init__(self, job: dict) -> None:
        self._job = job
        self._deadline = time.monotonic() + job["seconds"]
        self._cpu = _children_seconds()
        self._process, *pipes = bare.start("_worker")
        self._channel = Channel(*pipes)
        self.raised: BaseException | None = None  # what the last call raised, and how the program calls it
        self.raised_as = ""
        self.broken = ""  # what went wrong with the sandbox: no check can undo that by catching it

    def start(self, text: str) -> list[str]:
        """What the sandbox lacks. The program's text is there, and not yet executed."""
        job = {"program": text, "entry_point": self._job["entry_point"], "unsafe": self._job["unsafe"]}
        return self._exchange(job)["lacking"]

    def call(self, *args: object, **kwargs: object) -> object:
        """The candidate of `check`. Arguments and result go by value; what the program raises is raised here."""
        return self.ask({"args": values.encode(list(args)), "kwargs": values.encode(kwargs)})

    def ask(self, message: dict) -> object:
        reply = self._exchange(message)
        try:
            if "value" in reply:
                return values.decode(reply["value"])
            name, text = map(str, reply["raised"])
            kind = getattr(builtins, name, None)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            self._break("error: a reply that is no value")
        self.raised_as = f"{name}: {text}"
        try:
            catchable = issubclass(kind, Exception) and not issubclass(kind, ENDS_LOOPS)
            self.raised = kind(text) if catchable else RuntimeError(self.raised_as)
        except TypeError:  # no class, or one that wants other arguments
            self.raised = RuntimeError(self.raised_as)
        raise self.raised

    def finish(self) -> None:
        """Raises ChannelError if anything has gone wrong that the check does not know, or nobody has asked for."""
        if self.broken:
            raise ChannelError(self.broken)
        if self._channel.pending():
            self._break("error: a reply that nobody asked for")

    def stop(self) -> None:
        bare.stop(self._process)
        self._channel.close()

    def _exchange(self, message: dict) -> dict:
        """The reply to a message; whatever else happens breaks the sandbox for good."""
        self.finish()
        nonce = os.urandom(8).hex()
        try:
            self._channel.send({"nonce": nonce} | message, self._deadline)
            reply = json.loads(self._channel.receive(self._deadline))
        except ChannelError as error:
            self._break(self._death() if str(error) == "died" else str(error))
        except (ValueError, RecursionError):
            self._break("error: a reply that is not JSON")
        if type(reply) is not dict or reply.get("nonce") != nonce:
            self._break("error: a reply to another question")
        return reply

    def _break(self, why: str) -> None:
        self.broken = self.broken or why
        raise ChannelError(self.broken)

    def _death(self) -> str:
        """How the worker ended, for the reader only."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(0.2)  # its pipe is closed a moment before it has ended
        if self._process.returncode is None:
            return "error: the program closed its pipe"
        status = self._process.returncode
        if _children_seconds() - self._cpu > 0.9 * CPU_SECONDS:
            return f"timeout: {CPU_SECONDS} s of CPU time"
        return f"died: {SIGNALS.get(-status, -status)}" if status < 0 else f"died: exit status {status}"


def _children_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
