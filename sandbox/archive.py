"""Tar archives of file trees. What comes out of a sandbox is hostile and is unpacked by rules of our own.

`tarfile`'s data filter is not relied upon: older Python releases have ways around it (CVE-2025-4517 and its kin).
"""

from __future__ import annotations

import io
import os
import shutil
import tarfile
import tempfile
from pathlib import Path, PurePosixPath

from sparring.sandbox.request import SandboxRequestError

__all__ = ["MAX_MEMBERS", "pack_tree", "unpack_tree"]

MAX_MEMBERS = 100_000


def pack_tree(folder: Path, limit: int) -> bytes:
    """The contents of `folder` as an uncompressed tar archive, owned by nobody in particular. Links stay links.

    Raises:
        SandboxRequestError: more than `limit` bytes, a link that leads out of the tree, or a device.
    """
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for path in sorted(folder.rglob("*")):
            name = path.relative_to(folder).as_posix()
            info = archive.gettarinfo(path, arcname=name)
            if info is None or not (info.isreg() or info.isdir() or info.issym() or info.islnk()):
                raise SandboxRequestError(f"{path} is neither a file, a folder nor a link; leave it out of the upload")
            if info.issym() and _walk(name, info.linkname) is None:
                raise SandboxRequestError(
                    f"link {path} leads out of the uploaded tree, to {info.linkname}; leave it out"
                )
            info.uid = info.gid = 0
            info.uname = info.gname = ""
            if buffer.tell() + info.size > limit:
                raise SandboxRequestError(f"{folder} is larger than the limit of {limit} bytes")
            if info.isreg():
                with path.open("rb") as file:
                    archive.addfile(info, file)
            else:
                archive.addfile(info)
    return buffer.getvalue()


def unpack_tree(packed: bytes, folder: Path, limit: int) -> None:
    """Unpack into `folder`, which must be new or empty; all of it or nothing.

    Kept: files, folders, and relative symbolic links that stay inside. Permission bits are kept, but for set-user-id
    and its kin; owners and times are not.

    Raises:
        SandboxRequestError: not an archive; an absolute path, `..`, a device, a link out of the tree; too many or too
            large members; or `folder` is not empty.
    """
    if folder.exists() and any(folder.iterdir()):
        raise SandboxRequestError(f"{folder} is not empty; download into a new folder")
    folder.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=".unpack-", dir=folder.parent))
    try:
        try:
            with tarfile.open(fileobj=io.BytesIO(packed), mode="r:", tarinfo=_Member) as archive:
                _unpack(archive, staging, limit)
        except (tarfile.TarError, ValueError, EOFError, RecursionError) as error:
            raise SandboxRequestError(f"not a readable archive: {error}") from error
        except OSError as error:
            raise SandboxRequestError(f"the archive cannot be unpacked here: {error}") from error
        staging.chmod(0o755)
        staging.replace(folder)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise


class _Member(tarfile.TarInfo):
    """Refuses a size below zero, on which older Python releases go round for ever (CVE-2025-8194)."""

    def _block(self, count: int) -> int:
        if count < 0:
            raise tarfile.ReadError("a member has a size below zero")
        return super()._block(count)  # type: ignore[misc, no-any-return]


def _unpack(archive: tarfile.TarFile, staging: Path, limit: int) -> None:
    # Until the last step there is no link in the staging folder, so a path without ".." stays inside it.
    links: dict[PurePosixPath, PurePosixPath] = {}
    total = 0
    for count, member in enumerate(archive):
        path = _inside(member.name)
        total += member.size if member.isreg() else 0
        if count >= MAX_MEMBERS or total > limit:
            raise SandboxRequestError(f"the archive has more than {MAX_MEMBERS} members or {limit} bytes")
        if path is None:
            raise SandboxRequestError(f"archive member {member.name!r} would be written outside the folder")
        at = staging / path
        if member.isdir():
            at.mkdir(parents=True, exist_ok=True)
        elif member.isreg():
            content = archive.extractfile(member)
            assert content is not None
            _write(at, content.read(), member.mode)
        elif member.islnk():
            source = _inside(member.linkname)
            if source is None or not (staging / source).is_file():
                raise SandboxRequestError(
                    f"archive member {member.name!r} is a hard link to something else than an earlier file"
                )
            data = (staging / source).read_bytes()
            total += len(data)
            _write(at, data, (staging / source).stat().st_mode)
        elif member.issym():
            if _walk(path.as_posix(), member.linkname) is None:
                raise SandboxRequestError(
                    f"archive member {member.name!r} is a link out of the folder, to {member.linkname!r}"
                )
            links[path] = PurePosixPath(member.linkname)
        else:
            raise SandboxRequestError(f"archive member {member.name!r} is a device, a pipe or of an unknown type")
    for path, link in links.items():
        # A folder on the way that is itself a link would make the link's text mean something else.
        way = _walk(path.as_posix(), str(link))
        assert way is not None
        if any(step in links for step in (*way[:-1], *path.parents)) or (staging / path).exists():
            raise SandboxRequestError(f"archive member {str(path)!r} is a link that passes through another link")
    for path, link in links.items():
        at = staging / path
        at.parent.mkdir(parents=True, exist_ok=True)
        at.symlink_to(link)


def _write(at: Path, data: bytes, mode: int) -> None:
    at.parent.mkdir(parents=True, exist_ok=True)
    with open(os.open(at, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600), "wb") as file:
        file.write(data)
    at.chmod((mode & 0o777) | 0o600)


def _inside(name: str) -> PurePosixPath | None:
    """The relative path that a member's name is, or None where it is absolute, has `..` or a NUL."""
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or "\0" in name:
        return None
    return path


def _walk(name: str, linkname: str) -> list[PurePosixPath] | None:
    """The paths that a link named `name` passes, its target last, from the tree's root; None where it leads outside."""
    if linkname.startswith("/") or "\0" in linkname:
        return None
    at = PurePosixPath(name).parent
    way = [at]
    for part in PurePosixPath(linkname).parts:
        if part == "..":
            if not at.parts:
                return None
            at = at.parent
        else:
            at = at / part
        way.append(at)
    return way
