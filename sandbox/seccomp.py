"""A seccomp filter for bubblewrap: a classic BPF program that refuses the system calls escapes are made of.

Docker has its own profile; this one follows it in what it refuses (moby's default.json), as a list of what is denied
rather than of what is allowed, so that ordinary programs never meet it. See seccomp(2).
"""

from __future__ import annotations

import platform
import struct

__all__ = ["seccomp_program"]

# System call numbers by architecture: (AUDIT_ARCH, {name: number}). Names say what is refused.
_X86_64 = {
    "ptrace": 101, "process_vm_readv": 310, "process_vm_writev": 311, "kcmp": 312, "pidfd_getfd": 438,
    "add_key": 248, "request_key": 249, "keyctl": 250, "bpf": 321, "perf_event_open": 298, "userfaultfd": 323,
    "mount": 165, "umount2": 166, "pivot_root": 155, "chroot": 161, "move_mount": 429, "open_tree": 428, "fsopen": 430,
    "fsconfig": 431, "fsmount": 432, "fspick": 433, "mount_setattr": 442, "unshare": 272, "setns": 308,
    "init_module": 175, "finit_module": 313, "delete_module": 176, "kexec_load": 246, "kexec_file_load": 320,
    "reboot": 169, "swapon": 167, "swapoff": 168, "acct": 163, "quotactl": 179, "quotactl_fd": 443, "syslog": 103,
    "open_by_handle_at": 304, "name_to_handle_at": 303, "lookup_dcookie": 212, "nfsservctl": 180, "fanotify_init": 300,
    "io_uring_setup": 425, "io_uring_enter": 426, "io_uring_register": 427, "iopl": 172, "ioperm": 173, "vhangup": 153,
    "settimeofday": 164, "clock_settime": 227, "clock_adjtime": 305, "adjtimex": 159, "move_pages": 279, "mbind": 237,
    "set_mempolicy": 238, "migrate_pages": 256, "personality": 135,
}  # fmt: skip
_AARCH64 = {
    "ptrace": 117, "process_vm_readv": 270, "process_vm_writev": 271, "kcmp": 272, "pidfd_getfd": 438,
    "add_key": 217, "request_key": 218, "keyctl": 219, "bpf": 280, "perf_event_open": 241, "userfaultfd": 282,
    "mount": 40, "umount2": 39, "pivot_root": 41, "chroot": 51, "move_mount": 429, "open_tree": 428, "fsopen": 430,
    "fsconfig": 431, "fsmount": 432, "fspick": 433, "mount_setattr": 442, "unshare": 97, "setns": 268,
    "init_module": 105, "finit_module": 273, "delete_module": 106, "kexec_load": 104, "kexec_file_load": 294,
    "reboot": 142, "swapon": 224, "swapoff": 225, "acct": 89, "quotactl": 60, "quotactl_fd": 443, "syslog": 116,
    "open_by_handle_at": 265, "name_to_handle_at": 264, "fanotify_init": 262, "io_uring_setup": 425,
    "io_uring_enter": 426, "io_uring_register": 427, "vhangup": 58, "settimeofday": 170, "clock_settime": 112,
    "clock_adjtime": 266, "adjtimex": 171, "move_pages": 239, "mbind": 235, "set_mempolicy": 237,
    "migrate_pages": 238, "personality": 92,
}  # fmt: skip
_MACHINES = {"x86_64": (0xC000003E, _X86_64, 56, 16), "aarch64": (0xC00000B7, _AARCH64, 220, 29)}
_CLONE3 = 435
_CLONE_NEW_ANY = 0x7E020000  # user, mount, network, process, UTS, IPC and control-group namespaces
_TIOCSTI, _TIOCLINUX = 0x5412, 0x541C  # put characters into the terminal's input
_X32_BIT = 0x40000000

_LOAD, _EQUAL, _ABOVE_OR_EQUAL, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NR, _ARCH, _ARG0, _ARG1 = 0, 4, 16, 24  # offsets in struct seccomp_data; arguments are little-endian
_ALLOW, _KILL, _EPERM, _ENOSYS = 0x7FFF0000, 0x80000000, 0x00050001, 0x00050026


def seccomp_program(machine: str | None = None) -> bytes | None:
    """The filter as struct sock_filter[], as `bwrap --seccomp` reads it; None on an architecture without a table."""
    known = _MACHINES.get(machine or platform.machine())
    if known is None:
        return None
    arch, denied, clone, ioctl = known
    program: list[tuple[int, int, int, int]] = []

    def emit(code: int, value: int, if_true: int = 0, if_false: int = 0) -> None:
        program.append((code, if_true, if_false, value))

    def refuse_equal(value: int, answer: int) -> None:
        emit(_EQUAL, value, 0, 1)
        emit(_RETURN, answer)

    emit(_LOAD, _ARCH)
    emit(_EQUAL, arch, 1, 0)
    emit(_RETURN, _KILL)
    emit(_LOAD, _NR)
    emit(_ABOVE_OR_EQUAL, _X32_BIT, 0, 1)
    emit(_RETURN, _EPERM)
    for number in denied.values():
        refuse_equal(number, _EPERM)
    # clone3's flags lie in memory, where a filter cannot look; told that it is missing, the C library uses clone.
    refuse_equal(_CLONE3, _ENOSYS)
    emit(_EQUAL, clone, 0, 4)
    emit(_LOAD, _ARG0)
    emit(_ANY_BIT, _CLONE_NEW_ANY, 0, 1)
    emit(_RETURN, _EPERM)
    emit(_RETURN, _ALLOW)
    emit(_EQUAL, ioctl, 0, 5)
    emit(_LOAD, _ARG1)
    refuse_equal(_TIOCSTI, _EPERM)
    refuse_equal(_TIOCLINUX, _EPERM)
    emit(_RETURN, _ALLOW)
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in program)
