"""Programs that try to leave the sandbox, harm the host or pass without a right answer, and the attacked host.

A function `attack` takes the arguments of `add`. FACTS describes the host. A result that begins with "breach" names the
forbidden actions that succeeded.
"""

import contextlib
import fcntl
import os
import platform
import shutil
import socket
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from bass_lab.evaluation import confinement
from bass_lab.evaluation.problems import MINI_SET, Problem
from bass_lab.evaluation.sandbox import grade

ADD = Problem(
    task_id="t/0",
    prompt='def add(a, b):\n    """Return a plus b."""\n',
    entry_point="add",
    canonical_solution="    return a + b\n",
    test="def check(candidate):\n"
    "    for a, b, total in ((1, 2, 3), (5, -7, -2), (40, 2, 42)):\n"
    "        found = candidate(a, b)\n"
    "        assert found == total, found\n",
)
HELPERS = """
def tried(**attempts):
    done = []
    for name, attempt in attempts.items():
        try:
            attempt()
            done.append(name)
        except (Exception, SystemExit) as error:
            pass
    return "breach: " + ", ".join(done) if done else "refused"

def zero(result):
    if result != 0:
        raise OSError

def system(name, *args):
    import ctypes
    numbers = {"kill": (62, 129), "tgkill": (234, 131), "clone": (56, 220), "ptrace": (101, 117), "prctl": (157, 167),
               "prlimit64": (302, 261), "memfd_create": (319, 279), "shmget": (29, 194), "process_vm_readv": (310, 270),
               "io_uring_setup": (425, 425), "keyctl": (250, 219), "bpf": (321, 280), "execve": (59, 221),
               "timer_create": (222, 107), "rt_sigqueueinfo": (129, 138), "openat2": (437, 437), "creat": (85, 9999)}
    import os
    number = numbers[name][os.uname().machine == "aarch64"]
    result = ctypes.CDLL(None, use_errno=True).syscall(ctypes.c_long(number), *map(ctypes.c_long, args))
    if result == -1:
        raise OSError(ctypes.get_errno(), name)
    return result

def nonce():
    import sys
    frame = sys._getframe()
    while "channel" not in frame.f_locals or "message" not in frame.f_locals:
        frame = frame.f_back
    return frame.f_locals["message"]["nonce"]

def send(reply):
    import json, os
    text = reply if isinstance(reply, bytes) else json.dumps(reply).encode() + b"\\n"
    for descriptor in range(3, 32):
        try:
            os.write(descriptor, text)
        except OSError:
            pass
"""

ON_RESOURCES = {
    "fork bomb": """
def attack(a, b):
    import os
    return tried(fork=lambda: os.fork() or os._exit(0), vfork=lambda: os.posix_spawn("/bin/true", ["true"], {}),
                 clone=lambda: system("clone", 17, 0, 0, 0, 0) or os._exit(0))
""",
    "thread bomb": """
def attack(a, b):
    import threading, time
    return tried(thread=lambda: [threading.Thread(target=time.sleep, args=(60,)).start() for _ in range(1000)])
""",
    "memory bomb": """
def attack(a, b):
    kept = []
    while len(kept) < 600:
        kept.append(bytearray(b"x") * 2**20)
    return "breach: 600 MiB"
""",
    "ignored signals": """
import signal
for number in range(1, 65):
    try:
        signal.signal(number, signal.SIG_IGN)
    except (OSError, ValueError):
        pass
def attack(a, b):
    while True: pass
""",
    "SIGSTOP": """
def attack(a, b):
    import os, signal
    tried(stop=lambda: os.kill(os.getpid(), signal.SIGSTOP), raised=lambda: signal.raise_signal(signal.SIGSTOP))
    signal.pause()
""",
    "huge output": """
def attack(a, b):
    import os, sys
    while True:
        print("x" * 2**16)
        sys.stderr.write("x" * 2**16)
        os.write(1, bytes(2**16))
""",
}
if platform.machine() == "x86_64":
    ON_RESOURCES["calls of another architecture"] = """
def attack(a, b):
    import ctypes
    libc = ctypes.CDLL(None)
    libc.mmap.restype = ctypes.c_void_p
    address = libc.mmap(None, ctypes.c_size_t(4096), 7, 0x22, -1, ctypes.c_long(0))
    code = b"\\xb8\\x02\\x00\\x00\\x00\\xcd\\x80\\xc3"  # fork as 32-bit Linux numbers it
    ctypes.memmove(address, code, len(code))
    return f"breach: {ctypes.CFUNCTYPE(ctypes.c_int)(address)()}"
"""
ON_THE_HOST = {  # Landlock refuses these attacks, alone or with seccomp
    "disk bomb": """
def attack(a, b):
    import os
    def fill(folder):
        with open(os.path.join(folder, "bomb"), "wb") as file:
            for _ in range(64):
                file.write(bytes(2**20))
    folders = (FACTS["folder"], "/tmp", "/dev/shm", ".")
    return tried(**{folder: lambda folder=folder: fill(folder) for folder in folders},
                 memory=lambda: system("memfd_create", id(b"x") + 32, 0))
""",
    "write and delete": """
def attack(a, b):
    import os
    folder, victim = FACTS["folder"], FACTS["victim"]
    return tried(new=lambda: open(folder + "/new", "w"), over=lambda: open(victim, "w"),
                 append=lambda: open(victim, "a"), truncate=lambda: os.truncate(victim, 0),
                 folder=lambda: os.mkdir(folder + "/made"), null=lambda: open("/dev/null", "w"),
                 link=lambda: os.symlink("/", folder + "/link"), fifo=lambda: os.mkfifo(folder + "/fifo"),
                 rmdir=lambda: os.rmdir(FACTS["empty"]), rename=lambda: os.rename(FACTS["secret"], folder + "/moved"),
                 replace=lambda: os.replace(FACTS["secret"], victim), unlink=lambda: os.unlink(victim))
""",
    "open a file for neither reading nor writing": """
def attack(a, b):
    import ctypes, os
    path = FACTS["victim"]
    name = ctypes.create_string_buffer(path.encode())
    how = (ctypes.c_uint64 * 3)(3 | os.O_TRUNC, 0, 0)
    return tried(only=lambda: os.open(path, 3), emptied=lambda: os.open(path, 3 | os.O_TRUNC),
                 emptied_to_read=lambda: os.open(path, os.O_TRUNC), made=lambda: os.open(path + "2", 3 | os.O_CREAT),
                 nameless=lambda: os.open(FACTS["folder"], os.O_RDWR | os.O_TMPFILE),
                 creat=lambda: system("creat", ctypes.addressof(name), 0o600),
                 openat2=lambda: system("openat2", -100, ctypes.addressof(name), ctypes.addressof(how), 24))
""",
    "change a file's attributes": """
def attack(a, b):
    import ctypes, os
    path, libc, value = FACTS["victim"], ctypes.CDLL(None), ctypes.create_string_buffer(64)
    value[0] = 5
    opened = {"file": 0}
    return tried(
        opened=lambda: opened.update(file=os.open(path, 3)),
        hint=lambda: zero(libc.fcntl(opened["file"], 1036, value)),  # F_SET_RW_HINT
        flags=lambda: zero(libc.ioctl(opened["file"], ctypes.c_ulong(0x40086602), value)),  # FS_IOC_SETFLAGS
        more=lambda: zero(libc.ioctl(opened["file"], ctypes.c_ulong(0x401C5820), value)),  # FS_IOC_FSSETXATTR
        chmod=lambda: os.chmod(path, 0), times=lambda: os.utime(path, (0, 0)),
        owner=lambda: os.chown(path, os.getuid(), os.getgid()), attributes=lambda: os.setxattr(path, "user.x", b"x"))
""",
    "read a secret": """
def attack(a, b):
    import os
    return tried(secret=lambda: open(FACTS["secret"]), folder=lambda: os.listdir(FACTS["folder"]),
                 problems=lambda: open(FACTS["problems"]), users=lambda: os.listdir("/usr"),
                 passwords=lambda: open("/etc/passwd"), root=lambda: os.listdir("/"),
                 processes=lambda: os.listdir("/proc"), link=lambda: open("/usr/.." + FACTS["secret"]),
                 memory=lambda: open(f"/proc/{os.getppid()}/mem", "rb"), own=lambda: open("/proc/self/maps"))
""",
    "environment": """
def attack(a, b):
    import os
    return tried(own=lambda: os.environ["BASS_SECRET"], parent=lambda: open(f"/proc/{os.getppid()}/environ"),
                 harness=lambda: open(f"/proc/{FACTS['harness']}/environ"))
""",
    "inherited descriptors": """
def attack(a, b):
    import os, stat
    found = {}
    for descriptor in range(1024):
        try:
            found[descriptor] = os.fstat(descriptor)
        except OSError:
            pass
    pipes = [number for number, about in found.items() if stat.S_ISFIFO(about.st_mode)]
    others = [number for number, about in found.items() if number > 2 and not stat.S_ISFIFO(about.st_mode)]
    return tried(pipes=lambda: 1 / (len(pipes) > 2), others=lambda: 1 / len(others))
""",
    "network": """
def attack(a, b):
    import socket
    to = ("127.0.0.1", FACTS["udp"])
    return tried(tcp=lambda: socket.create_connection(("127.0.0.1", FACTS["tcp"]), 1),
                 listen=lambda: socket.create_server(("127.0.0.1", 0)),
                 udp=lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b"x", to),
                 unix=lambda: socket.socket(socket.AF_UNIX).connect(FACTS["unix"]), pair=socket.socketpair)
""",
    "kill the parent": """
def attack(a, b):
    import ctypes, os
    def by_descriptor():
        fcntl = ctypes.CDLL(None).fcntl
        for descriptor in range(3, 32):
            owned, chosen = fcntl(descriptor, 8, os.getppid()), fcntl(descriptor, 10, 9)  # F_SETOWN, F_SETSIG
            if owned == 0 or chosen == 0:
                return
        raise OSError
    return tried(parent=lambda: os.kill(os.getppid(), 9), harness=lambda: os.kill(FACTS["harness"], 9),
                 all=lambda: os.kill(-1, 9), group=lambda: os.killpg(0, 15), descriptor=by_descriptor,
                 thread=lambda: system("tgkill", FACTS["harness"], FACTS["harness"], 9),
                 pidfd=lambda: os.pidfd_open(os.getppid()))
""",
    "fill the user's queue of signals": """
def attack(a, b):
    import ctypes, os, signal
    signal.pthread_sigmask(signal.SIG_BLOCK, {64})
    timer, about = ctypes.c_int(), (ctypes.c_int * 32)(64, 0, -1)
    return tried(timer=lambda: system("timer_create", 0, 0, ctypes.addressof(timer)),
                 sent=lambda: os.kill(os.getpid(), 64), raised=lambda: signal.raise_signal(64),
                 queued=lambda: system("rt_sigqueueinfo", os.getpid(), 64, ctypes.addressof(about)))
""",
    "limit, starve and trace the parent": """
def attack(a, b):
    import os, resource
    return tried(limit=lambda: resource.prlimit(os.getppid(), resource.RLIMIT_CPU, (0, 0)),
                 nice=lambda: os.setpriority(os.PRIO_USER, 0, 19), pin=lambda: os.sched_setaffinity(os.getppid(), {0}),
                 own=lambda: system("prlimit64", 0, 0, 0, 0),
                 attach=lambda: system("ptrace", 16, os.getppid(), 0, 0), me=lambda: system("ptrace", 0, 0, 0, 0),
                 read=lambda: system("process_vm_readv", os.getppid(), 0, 0, 0, 0, 0))
""",
    "daemonise": """
def attack(a, b):
    import os
    return tried(session=os.setsid, group=lambda: os.setpgid(0, 0), fork=lambda: os.fork() or os._exit(0),
                 outlive=lambda: system("prctl", 1, 0, 0, 0, 0))
""",
    "execute": """
def attack(a, b):
    import os, subprocess
    found = tried(run=lambda: subprocess.run(["/bin/sh", "-c", "exit 0"]), shell=lambda: 1 / (os.system("exit 0") == 0))
    return tried(replace=lambda: os.execv("/bin/true", ["true"])) if found == "refused" else found
""",
    "namespaces and privileges": """
def attack(a, b):
    import ctypes, os
    libc = ctypes.CDLL(None, use_errno=True)
    return tried(user=lambda: zero(libc.unshare(0x10000000)), network=lambda: zero(libc.unshare(0x40000000)),
                 mount=lambda: zero(libc.mount(b"none", b"/tmp", b"tmpfs", 0, None)),
                 chroot=lambda: zero(libc.chroot(b"/usr")), nested=lambda: system("clone", 0x10000011, 0, 0, 0, 0),
                 uid=lambda: os.setuid(0), all=lambda: os.setresuid(0, 0, 0), groups=lambda: os.setgroups([0]),
                 root=lambda: 1 / (os.geteuid() == 0))
""",
    "objects that outlive the process": """
def attack(a, b):
    return tried(shared=lambda: system("shmget", 0, 4096, 0o1600), ring=lambda: system("io_uring_setup", 4, 0),
                 keys=lambda: system("keyctl", 0, -3, 1), bpf=lambda: system("bpf", 0, 0, 0))
""",
}
ON_THE_GRADE = {
    "exit": "import atexit, os\natexit.register(lambda: os._exit(0))\ndef attack(a, b):\n    raise SystemExit(0)",
    "printed tokens": """
def attack(a, b):
    import sys
    for text in ("passed", "PASSED", "OK", '{"passed": true, "reason": "passed"}'):
        print(text, flush=True)
        print(text, file=sys.stderr, flush=True)
        send(text.encode() + b"\\n")
    sys.exit(0)
""",
    "equality": """
class Equal(int):
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __hash__(self): return 0
    def __bool__(self): return True
Equal.__name__ = Equal.__qualname__ = "int"
def attack(a, b):
    return Equal(0)
""",
    "expected values in frames and objects": """
def attack(a, b):
    import gc, sys
    frame, seen = sys._getframe(), []
    while frame:
        seen.append((frame.f_code.co_filename, repr(frame.f_locals)))
        for name, value in list(frame.f_locals.items()) + list(frame.f_globals.items()):
            if name in ("total", "check", "test", "candidate"):
                return "breach: " + name
        frame = frame.f_back
    if any("assert fou" + "nd" in text for _, text in seen):
        return "breach: a frame"
    for thing in gc.get_objects():
        if isinstance(thing, dict) and any(isinstance(value, str) and "def check" + "(candidate)" in value
                                           for value in list(thing.values())):
            return "breach: the test"
    return "nothing"
""",
    "patched modules": """
import builtins, json, sys
builtins.AssertionError = type("AssertionError", (Exception,), {})
builtins.isinstance = lambda *_: True
builtins.len = lambda *_: 0
json.dumps = lambda *_, **__: '{"passed": true, "reason": "passed", "value": 3}'
sys.modules["values"].encode = lambda value: {"anything": 1}
def attack(a, b):
    return object()
""",
    "forged reply, early": """
for value in (3, -2, 42, True):
    send({"nonce": "0000000000000000", "value": value})
def attack(a, b):
    return 0
""",
    "forged replies, all at once": """
def attack(a, b):
    for value in (3, -2, 42):  # knows the first call's number only
        send({"nonce": nonce(), "value": value})
    return 3
""",
    "forged replies to later calls": """
def attack(a, b):
    import time
    first = nonce()
    for value in (3, -2, 42):  # each after the next question
        send({"nonce": first, "value": value})
        time.sleep(0.1)
    time.sleep(1000)
""",
    "second reply to the last call": """
def attack(a, b):
    import json
    if a == 40:
        send(2 * (json.dumps({"nonce": nonce(), "value": 42}).encode() + b"\\n"))
    return a + b
""",
    "forged verdict": """
def attack(a, b):
    send({"nonce": nonce(), "passed": True, "reason": "passed", "lacking": []})
""",
    "forged exception": """
def attack(a, b):
    for name in ("ChannelError", "SystemExit", "BaseException", "eval", "__import__"):
        send({"nonce": nonce(), "raised": [name, "passed"]})
""",
    "endless reply": "def attack(a, b):\n    while True: send(b'x' * 2**16)",
    "deep reply": "def attack(a, b):\n    send(b'[' * 500_000 + b'\\n')",
    "half a line": "def attack(a, b):\n    import time\n    send(b'{\"nonce\": ')\n    time.sleep(1000)",
    "closed pipes": "def attack(a, b):\n    import os, time\n    os.closerange(0, 64)\n    time.sleep(1000)",
}
ATTACKS = ON_RESOURCES | ON_THE_HOST | ON_THE_GRADE
ENDLESS = ("ignored signals", "SIGSTOP", "huge output", "forged replies to later calls", "half a line", "closed pipes")
# These attacks work without a sandbox and do not harm the host.
HARMLESS = (
    "fork bomb",
    "write and delete",
    "open a file for neither reading nor writing",
    "change a file's attributes",
    "read a secret",
    "environment",
    "inherited descriptors",
    "network",
    "fill the user's queue of signals",
    "daemonise",
    "execute",
)


class Host:
    """Files and sockets for every user without a sandbox."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="bass-host-"))
        self.folder.chmod(0o777)
        (self.folder / "secret").write_text("the secret")
        (self.folder / "victim").write_text("untouched")
        (self.folder / "empty").mkdir()
        for path in self.folder.iterdir():
            path.chmod(0o777)
        self.inherited = os.open(self.folder / "secret", os.O_RDONLY)
        os.set_inheritable(self.inherited, True)
        os.environ["BASS_SECRET"] = "the secret"
        self.tcp = socket.create_server(("127.0.0.1", 0))
        self.udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self.udp.bind(("127.0.0.1", 0))
        self.unix = socket.socket(socket.AF_UNIX)
        self.unix.bind(f"\0{self.folder.name}")
        self.unix.listen()
        for each in (self.tcp, self.udp, self.unix):
            each.setblocking(False)
        self.before = self.state()

    def facts(self) -> dict:
        files = {name: str(self.folder / name) for name in ("secret", "victim", "empty")} | {"problems": str(MINI_SET)}
        ports = {"tcp": self.tcp.getsockname()[1], "udp": self.udp.getsockname()[1], "unix": f"\0{self.folder.name}"}
        return {"folder": str(self.folder), "harness": os.getpid()} | files | ports

    def state(self) -> list:
        paths = [self.folder, *sorted(self.folder.rglob("*"))]
        about = [(str(path), path.lstat()) for path in paths]
        files = [(path, stat.st_mode, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns) for path, stat in about]
        with (self.folder / "victim").open() as victim:
            files.append(fcntl.fcntl(victim, 1035, bytes(8)))  # F_GET_RW_HINT
        return [*files, os.nice(0), os.sched_getaffinity(0), Path("/tmp/bomb").exists(), Path("/dev/shm/bomb").exists()]

    def complaints(self) -> list[str]:
        found = [] if self.state() == self.before else ["the host has changed"]
        for name, receive in (("TCP", self.tcp.accept), ("UDP", lambda: self.udp.recv(1)), ("unix", self.unix.accept)):
            with contextlib.suppress(BlockingIOError):
                receive()
                found.append(f"{name} has come through")
        return found

    def close(self) -> None:
        os.close(self.inherited)
        os.environ.pop("BASS_SECRET", None)  # from another host
        for each in (self.tcp, self.udp, self.unix):
            each.close()
        shutil.rmtree(self.folder)


def program(name: str, host: Host) -> str:
    return ADD.prompt + f"    return attack(a, b)\n\nFACTS = {host.facts()!r}\n" + HELPERS + ATTACKS[name]


def run(name: str, host: Host, seconds: float) -> list[str]:
    before = set(running_children())
    began = time.monotonic()
    found = grade(ADD, program(name, host).removeprefix(ADD.prompt), seconds=seconds)
    took = time.monotonic() - began
    complaints = host.complaints()
    if found.passed or "breach" in found.reason:
        complaints.append(str(found))
    if took > seconds + 1:
        complaints.append(f"took {took:.2f} s")
    if left := set(running_children()) - before:
        complaints.append(f"left running: {left}")
    return complaints


def adopt_orphans() -> None:
    confinement.syscall(157 if platform.machine() == "x86_64" else 167, 36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER


def running_children(process: int | str = "self") -> list[int]:
    found, gone = [], (FileNotFoundError, ProcessLookupError)
    with contextlib.suppress(*gone):  # the process has ended; below: a thread or child
        for task in Path(f"/proc/{process}/task").iterdir():
            children = ""
            with contextlib.suppress(*gone):
                children = (task / "children").read_text()
            for child in map(int, children.split()):
                with contextlib.suppress(*gone):
                    state = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[0]
                    found += [child] * (state != "Z") + running_children(child)
    return found


# Added to confinement.py: confine as on a kernel with an older Landlock.
LANDLOCK = "\n\ndef landlock_version() -> int:\n    return {}\n"


@contextlib.contextmanager
def standalone(added: str = "") -> Iterator[Path]:
    """Yield a folder, readable for every user, with this file and the evaluation package. added: code at the end of its
    confinement.py."""
    folder = Path(tempfile.mkdtemp(prefix="bass-standalone-"))
    try:
        source, package = Path(confinement.__file__).parent, folder / "bass_lab" / "evaluation"
        shutil.copytree(source, package, ignore=shutil.ignore_patterns("__pycache__"))
        for path in (package, package.parent):
            (path / "__init__.py").write_text("")
        with (package / "confinement.py").open("a") as file:
            file.write(added)
        shutil.copy(__file__, folder)
        for path in (folder, *folder.rglob("*")):
            path.chmod(0o755)
        yield folder
    finally:
        shutil.rmtree(folder)
