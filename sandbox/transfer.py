"""Files into a sandbox and out of it: by fixed scripts that run inside, with the sandbox's own rights.

Paths reach a script as "$1" and "$2", never as code, and every transfer is bounded by `SandboxSpec.max_transfer_mib`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from sparring.errors import SandboxError
from sparring.sandbox.command import run_to_end
from sparring.sandbox.output import BoundedOutput
from sparring.sandbox.request import SandboxRequestError
from sparring.sandbox.spec import MIB, SandboxSpec

if TYPE_CHECKING:
    from sparring.sandbox.core import Sandbox

__all__ = ["Snapshot", "empty_folder", "pack_folder", "read_file", "transfer_limit", "unpack_into", "write_file"]

_PROBE_S = 5.0
_COMPLAINT_BYTES = 4096


@dataclass(frozen=True)
class Snapshot:
    """A sandbox's image and the files of its work folder, as a tar archive. No processes."""

    image: str
    work_tar: bytes = field(repr=False)


def transfer_limit(spec: SandboxSpec) -> int:
    """The most bytes that one transfer moves."""
    return spec.max_transfer_mib * MIB


async def read_file(sandbox: Sandbox, path: str, *, max_bytes: int | None, timeout_s: float) -> bytes:
    """As `Sandbox.read`; `path` is absolute, as all below."""
    most = transfer_limit(sandbox.spec)
    limit = min(max_bytes or most, most)
    # `head` bounds what a device or an endless pipe can send.
    script = '[ -f "$1" ] || { echo "no such file" >&2; exit 1; }; head -c "$2" -- "$1"'
    data = await _run_script(sandbox, script, path, str(limit + 1), timeout_s=timeout_s)
    if len(data) > limit:
        raise SandboxRequestError(f"{path}: more than {limit} bytes")
    return data


async def write_file(sandbox: Sandbox, path: str, data: bytes, *, mode: int, timeout_s: float) -> None:
    """As `Sandbox.write`."""
    _check_size(sandbox.spec, len(data), path)
    script = (
        '[ ! -e "$1" ] || [ -f "$1" ] || { echo "there is something else than a file" >&2; exit 1; }; '
        'mkdir -p -- "$(dirname -- "$1")" && cat > "$1" && chmod "$2" -- "$1"'
    )
    await _run_script(sandbox, script, path, f"{mode:o}", stdin=data, timeout_s=timeout_s)


async def pack_folder(sandbox: Sandbox, path: str, *, timeout_s: float) -> bytes:
    """The contents of a folder as a tar archive, which is hostile."""
    script = 'cd -- "$1" && tar -cf - . | head -c "$2"'
    return await _run_script(sandbox, script, path, str(transfer_limit(sandbox.spec) + 1), timeout_s=timeout_s)


async def unpack_into(sandbox: Sandbox, packed: bytes, path: str, *, timeout_s: float) -> None:
    """Unpack a tar archive into a folder, which is made. What an archive does there, any command could do."""
    script = 'mkdir -p -- "$1" && tar -xf - --no-same-owner -C "$1"'
    await _run_script(sandbox, script, path, stdin=packed, timeout_s=timeout_s)


async def empty_folder(sandbox: Sandbox, path: str, *, timeout_s: float) -> None:
    await _run_script(sandbox, 'find "$1" -mindepth 1 -delete', path, timeout_s=timeout_s)


def _check_size(spec: SandboxSpec, size: int, what: str) -> None:
    if size > transfer_limit(spec):
        raise SandboxRequestError(f"{what}: {size} bytes, above max_transfer_mib = {spec.max_transfer_mib}")


async def _run_script(sandbox: Sandbox, script: str, *args: str, stdin: bytes = b"", timeout_s: float) -> bytes:
    stdout, stderr = bytearray(), BoundedOutput(_COMPLAINT_BYTES)
    limit = transfer_limit(sandbox.spec)

    def on_output(stream: int, data: bytes) -> None:
        if stream == 2:
            stderr.feed(data)
        elif len(stdout) <= limit:
            stdout.extend(data)

    argv = ["/bin/sh", "-c", script, "sh", *args]
    ended = await run_to_end(sandbox, argv, on_output, timeout_s=timeout_s, stdin=stdin)
    if ended.timed_out:
        # A pipe in the place of a file keeps whoever opens it waiting: then the sandbox itself still answers.
        probe = await run_to_end(sandbox, ["true"], lambda *_: None, timeout_s=_PROBE_S)
        error = SandboxRequestError if probe.exit_code == 0 else SandboxError
        raise error(f"{args[0]}: the transfer did not end within {ended.duration_s:.1f} s")
    _check_size(sandbox.spec, len(stdout), args[0])
    if ended.exit_code != 0:
        raise SandboxRequestError(f"{args[0]}: {stderr.text().strip() or f'exit code {ended.exit_code}'}")
    return bytes(stdout)
