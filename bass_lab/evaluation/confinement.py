"""Confine this process before an untrusted program runs, with Linux's Landlock and seccomp, by ctypes.

Both need no privileges or packages, and work in containers without namespaces. Landlock (Linux >= 5.13) leaves only the
standard library readable, and nothing writable. A seccomp filter refuses system calls that reach beyond the process:
other processes, signals, sockets, persistent objects, and file changes that Landlock does not cover (chmod, utime,
extended attributes; before Linux 6.2, truncation by open). All measures are permanent and apply to child processes.
"""

from __future__ import annotations

import ctypes
import functools
import os
import signal
import struct
import sys

NOBODY = 65534
ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}  # seccomp's numbers of the architectures
NEWEST = 456  # highest system call number that the filter allows, on both
LANDLOCK_CREATE_RULESET, LANDLOCK_ADD_RULE, LANDLOCK_RESTRICT_SELF = 444, 445, 446
READ_FILE, READ_DIR = 1 << 2, 1 << 3
SECCOMP_RET_ERRNO, SECCOMP_RET_KILL, SECCOMP_RET_ALLOW = 0x00050000, 0x80000000, 0x7FFF0000
PR_SET_PDEATHSIG, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS = 1, 22, 38
OPEN_FLAGS = ("O_CLOEXEC", "O_DIRECTORY", "O_LARGEFILE", "O_NOFOLLOW", "O_NONBLOCK")  # allowed flags: read-only opens
FCNTL_COMMANDS = (0, 1, 2, 3, 4, 1030)  # allowed: F_DUPFD, F_GETFD, F_SETFD, F_GETFL, F_SETFL, F_DUPFD_CLOEXEC

# name, number on x86_64, number on aarch64 ("-": no such call)
NEEDED = "prctl 157 167, seccomp 317 277"
JUDGED = "open 2 -, openat 257 56, openat2 437 437, fcntl 72 25"  # allowed or refused by argument
REFUSED = (
    # processes
    "fork 57 -, vfork 58 -, clone 56 220, clone3 435 435, execve 59 221, execveat 322 281, setsid 112 157, "
    "setpgid 109 154, ptrace 101 117, process_vm_readv 310 270, process_vm_writev 311 271, kcmp 312 272, "
    "pidfd_open 434 434, pidfd_getfd 438 438, process_madvise 440 440, process_mrelease 448 448, prctl 157 167, "
    "seccomp 317 277, personality 135 92, modify_ldt 154 -, "
    # signals
    "kill 62 129, tkill 200 130, tgkill 234 131, rt_sigqueueinfo 129 138, rt_tgsigqueueinfo 297 240, "
    "pidfd_send_signal 424 424, timer_create 222 107, "  # each timer occupies the user's queue of signals
    # limits and scheduling of the same user's processes
    "prlimit64 302 261, setpriority 141 140, sched_setaffinity 203 122, sched_setscheduler 144 119, "
    "sched_setparam 142 118, sched_setattr 314 274, ioprio_set 251 30, migrate_pages 256 238, move_pages 279 239, "
    # sockets
    "socket 41 198, socketpair 53 199, connect 42 203, bind 49 200, listen 50 201, accept 43 202, accept4 288 242, "
    "sendto 44 206, sendmsg 46 211, sendmmsg 307 269, recvfrom 45 207, recvmsg 47 212, recvmmsg 299 243, "
    # persistent objects, and memory outside the address space
    "shmget 29 194, shmat 30 196, shmctl 31 195, semget 64 190, semop 65 193, semctl 66 191, semtimedop 220 192, "
    "msgget 68 186, msgsnd 69 189, msgrcv 70 188, msgctl 71 187, mq_open 240 180, mq_unlink 241 181, "
    "memfd_create 319 279, memfd_secret 447 447, add_key 248 217, request_key 249 218, keyctl 250 219, "
    # namespaces and mounts
    "unshare 272 97, setns 308 268, mount 165 40, umount2 166 39, pivot_root 155 41, chroot 161 51, "
    "open_tree 428 428, move_mount 429 429, fsopen 430 430, fsconfig 431 431, fsmount 432 432, fspick 433 433, "
    "mount_setattr 442 442, swapon 167 224, swapoff 168 225, quotactl 179 60, quotactl_fd 443 443, "
    # the kernel and the machine
    "bpf 321 280, perf_event_open 298 241, userfaultfd 323 282, io_uring_setup 425 425, io_uring_enter 426 426, "
    "io_uring_register 427 427, io_setup 206 0, fanotify_init 300 262, fanotify_mark 301 263, inotify_init 253 -, "
    "inotify_init1 294 26, name_to_handle_at 303 264, open_by_handle_at 304 265, init_module 175 105, "
    "finit_module 313 273, delete_module 176 106, kexec_load 246 104, kexec_file_load 320 294, reboot 169 142, "
    "syslog 103 116, acct 163 89, iopl 172 -, ioperm 173 -, sethostname 170 161, setdomainname 171 162, "
    "settimeofday 164 170, clock_settime 227 112, adjtimex 159 171, clock_adjtime 305 266, vhangup 153 58, "
    "sync 162 81, syncfs 306 267, "
    # identities
    "setuid 105 146, setgid 106 144, setreuid 113 145, setregid 114 143, setresuid 117 147, setresgid 119 149, "
    "setfsuid 122 151, setfsgid 123 152, setgroups 116 159, capset 126 91, "
    # files; Landlock does not cover the calls before mkdir
    "chmod 90 -, fchmod 91 52, fchmodat 268 53, fchmodat2 452 452, chown 92 -, fchown 93 55, lchown 94 -, "
    "fchownat 260 54, utime 132 -, utimes 235 -, utimensat 280 88, futimesat 261 -, setxattr 188 5, lsetxattr 189 6, "
    "fsetxattr 190 7, removexattr 197 14, lremovexattr 198 15, fremovexattr 199 16, flock 73 32, ioctl 16 29, "
    "truncate 76 45, mkdir 83 -, mkdirat 258 34, mknod 133 -, mknodat 259 33, rename 82 -, renameat 264 38, "
    "renameat2 316 276, link 86 -, linkat 265 37, symlink 88 -, symlinkat 266 36, unlink 87 -, unlinkat 263 35, "
    "rmdir 84 -, creat 85 -"
)


def lacking() -> list[str]:
    """Return the requirements of the sandbox that this machine lacks. Changes nothing."""
    if sys.platform != "linux" or _machine() not in ARCHITECTURES:
        return [f"Linux on {' or '.join(ARCHITECTURES)} (this is {sys.platform} on {_machine()})"]
    missing = []
    try:
        landlock_version()
    except OSError as error:
        missing.append(f"Landlock (Linux >= 5.13 with `landlock` among its security modules): {error.strerror}")
    try:
        action = ctypes.c_uint32(SECCOMP_RET_ERRNO)
        syscall(_numbers(NEEDED)["seccomp"], 2, 0, ctypes.byref(action))  # SECCOMP_GET_ACTION_AVAIL
    except OSError as error:
        missing.append(f"seccomp filters: {error.strerror}")
    return missing


def syscall(number: int, *arguments: object) -> int:
    """Make a system call and return the result. Raises OSError if the call fails."""
    libc = _libc()
    result = libc.syscall(*(ctypes.c_long(part) if isinstance(part, int) else part for part in (number, *arguments)))
    if result == -1:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result


@functools.cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)  # fails on Windows
    libc.syscall.restype = ctypes.c_long
    return libc


def _machine() -> str:
    return os.uname().machine if hasattr(os, "uname") else "another machine"  # Windows has no uname


def _numbers(table: str) -> dict[str, int]:
    """Return the numbers of the table's system calls on this architecture."""
    column = 1 + list(ARCHITECTURES).index(_machine())
    rows = [row.split() for row in table.split(",")]
    return {row[0]: int(row[column]) for row in rows if row[column] != "-"}


def _prctl(option: int, *arguments: object) -> None:
    syscall(_numbers(NEEDED)["prctl"], option, *arguments, *[0] * (4 - len(arguments)))


def no_new_privileges() -> None:
    """Disable set-uid programs, as Landlock and seccomp require."""
    _prctl(PR_SET_NO_NEW_PRIVS, 1)


def drop_root() -> None:
    """If root, become an unprivileged user, without groups and capabilities."""
    if os.getuid() == 0 or os.geteuid() == 0:
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)


def die_with(parent: int) -> None:
    """Have the kernel kill this process when the parent dies. Call after `drop_root`: a change of the uid resets this.

    Raises ProcessLookupError if the parent is already dead.
    """
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        raise ProcessLookupError("the process that started this one has died")


def landlock_version() -> int:
    """Return the version of Landlock's interface. Raises OSError on a kernel without Landlock."""
    return syscall(LANDLOCK_CREATE_RULESET, 0, 0, 1)


def readable_paths() -> list[str]:
    """Return the paths of the standard library's modules and of the time zones.

    Each module is listed separately, because Landlock has no exceptions and the library's folder may contain packages.
    """
    library = os.path.dirname(os.__file__)
    names = {"lib-dynload", "__pycache__", *sys.stdlib_module_names}
    modules = [os.path.join(library, each) for each in os.listdir(library) if each.partition(".")[0] in names]
    return [path for path in (*modules, "/usr/share/zoneinfo") if os.path.exists(path)]


def restrict_files() -> None:
    """Allow only reading of `readable_paths`: no writing, executing or creating of files, no TCP, no signals to others.

    Call before `drop_root`: an unprivileged user may lack access to the interpreter's libraries, which the rules name.
    """
    version = landlock_version()
    rights = ((1 << (13 + (version >= 2) + (version >= 3))) - 1) | (version >= 5) << 15
    network, scopes = (3 if version >= 4 else 0), (3 if version >= 6 else 0)
    size = 24 if version >= 6 else 16 if version >= 4 else 8
    ruleset = syscall(LANDLOCK_CREATE_RULESET, struct.pack("QQQ", rights, network, scopes)[:size], size, 0)
    for path in readable_paths():
        opened = os.open(path, os.O_PATH | os.O_CLOEXEC)
        reading = READ_FILE | READ_DIR if os.path.isdir(path) else READ_FILE
        syscall(LANDLOCK_ADD_RULE, ruleset, 1, struct.pack("=Qi", reading, opened), 0)
        os.close(opened)
    syscall(LANDLOCK_RESTRICT_SELF, ruleset, 0)
    os.close(ruleset)


def refuse_calls(refused: str = REFUSED, judged: str = JUDGED) -> None:
    """Make the calls of `refused` fail with EPERM, and the calls of `judged` unless the arguments are harmless.

    openat2 and calls above NEWEST fail with ENOSYS, as on a kernel without these calls.
    """
    program = bpf_program(sorted(_numbers(refused).values()), _numbers(judged))
    instructions = ctypes.create_string_buffer(program, len(program))
    header = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(instructions))
    _prctl(PR_SET_SECCOMP, 2, header)


def bpf_program(refused: list[int], judged: dict[str, int]) -> bytes:
    """Return the filter as classic BPF over `struct seccomp_data` (nr, arch, instruction pointer, arguments)."""

    def load(offset: int) -> bytes:
        return struct.pack("HBBI", 0x20, 0, 0, offset)

    def argument(index: int) -> bytes:
        return load(16 + 8 * index)  # the lower half: the kernel reads only these bytes of an int

    def unless_equal(value: int, skip: int) -> bytes:
        return struct.pack("HBBI", 0x15, 0, skip, value)

    def unless_any(bits: int, skip: int) -> bytes:
        return struct.pack("HBBI", 0x45, 0, skip, bits)

    def give(action: int) -> bytes:
        return struct.pack("HBBI", 0x06, 0, 0, action)

    eperm, enosys, allow = give(SECCOMP_RET_ERRNO | 1), give(SECCOMP_RET_ERRNO | 38), give(SECCOMP_RET_ALLOW)
    other_flags = 0xFFFFFFFF & ~sum(getattr(os, name) for name in OPEN_FLAGS)
    judgements = {
        "open": argument(1) + unless_any(other_flags, 1) + eperm + allow,
        "openat": argument(2) + unless_any(other_flags, 1) + eperm + allow,
        "openat2": enosys,  # a filter cannot follow the pointer to the flags; libraries fall back to openat
        "fcntl": argument(1) + b"".join(unless_equal(command, 1) + allow for command in FCNTL_COMMANDS) + eperm,
    }
    program = load(4) + struct.pack("HBBI", 0x15, 1, 0, ARCHITECTURES[_machine()]) + give(SECCOMP_RET_KILL)
    program += load(0) + struct.pack("HBBI", 0x25, 0, 1, NEWEST) + enosys  # also refuses x32, with greater numbers
    program += b"".join(unless_equal(number, 1) + eperm for number in refused)
    for name, number in judged.items():
        program += unless_equal(number, len(judgements[name]) // 8) + judgements[name]
    return program + allow
