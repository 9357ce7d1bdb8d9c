"""Cubins kept on disk under the names of `cubin_key`, so that a process need not compile what an earlier one did.

A file is a line that says what it is, a line of JSON with the kernel's entry and a digest, and the cubin. Nothing in it
is Python, but it is code for a GPU, so a folder that others may write to is not read from. A file is written beside its
place and then moved there, so that no one sees half of it; one that is damaged all the same counts as absent.

Where: the environment variable FLASHPROOF_CACHE, "off" for nowhere; else ``flashproof`` in XDG_CACHE_HOME or ~/.cache.
"""

import hashlib
import json
import os
import stat
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

FIRST_LINE = b"flashproof cubin 1\n"
LIMIT_BYTES = 256 << 20  # of a folder, after which the files that were not used for longest go


class Cubin(NamedTuple):
    """A linked kernel.

    Attributes
    ----------
    code : bytes
    entry : str
        The name under which it is found in the code.
    """

    code: bytes
    entry: str


def folder():
    """The cache's folder, there or not; None if it is switched off."""
    named = os.environ.get("FLASHPROOF_CACHE")
    if named is not None:
        return None if named.lower() in ("", "0", "off") else Path(named).expanduser()
    base = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(base):  # its specification: a relative path counts as none
        base = os.path.expanduser("~/.cache")
    return Path(base) / "flashproof" if os.path.isabs(base) else None  # without a home there is no place


def load(name):
    """The `Cubin` of this name; None if there is none that can be trusted."""
    path = _path(name)
    if path is None:
        return None
    try:
        if not _ours(path.parent):
            return None
        data = path.read_bytes()
    except OSError:
        return None
    cubin = _parsed(data, name)
    with suppress(OSError):
        if cubin is None:
            path.unlink()
        else:
            os.utime(path)  # used: the last to go
    return cubin


def store(name, cubin):
    """Keep a cubin, if there is a place for it; whether it was kept."""
    path = _path(name)
    if path is None:
        return False
    head = {"name": name, "entry": cubin.entry, "sha256": hashlib.sha256(cubin.code).hexdigest()}
    data = FIRST_LINE + json.dumps(head).encode() + b"\n" + cubin.code
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not _ours(path.parent):
            return False
        handle, part = tempfile.mkstemp(prefix=".", dir=path.parent)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
            os.replace(part, path)
        except BaseException:
            os.unlink(part)
            raise
        _prune(path.parent)
    except OSError:  # a full or read-only disk costs a compilation, not the answer
        return False
    return True


def _path(name):
    where = folder()
    return None if where is None else where / f"{name}.cubin"


def _ours(where):
    """Whether a folder belongs to the user and nobody else can put files there."""
    if os.name != "posix":
        return True
    facts = where.stat()
    return facts.st_uid == os.getuid() and not facts.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _parsed(data, name):
    """The cubin in a file's bytes; None if they are not what was stored under this name."""
    if not data.startswith(FIRST_LINE):
        return None
    line, _, code = data[len(FIRST_LINE) :].partition(b"\n")
    try:
        head = json.loads(line)
        whole = head["name"] == name and head["sha256"] == hashlib.sha256(code).hexdigest()
        return Cubin(code, str(head["entry"])) if whole else None
    except (ValueError, KeyError, TypeError):
        return None


def _prune(where):
    """Remove the files that were not used for longest, down to the limit."""
    files = [(path.stat(), path) for path in where.glob("*.cubin")]
    spare = sum(facts.st_size for facts, _ in files) - LIMIT_BYTES
    for facts, path in sorted(files, key=lambda file: file[0].st_mtime):
        if spare <= 0:
            break
        path.unlink()
        spare -= facts.st_size
