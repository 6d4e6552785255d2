"""A numpy ``.npz`` file, written tensor by tensor."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import numpy as np
import xxhash

from tensortrace.cli.export.chosen import Chosen

ABOUT = "__about__"
"""The member that says what the others are, as JSON."""

_LONGEST = 1000
"""Characters of a member's name: a zip holds no more than 65,535 bytes of one."""


def write(tensors: list[Chosen], about: dict[str, str], target: Path) -> None:
    """Write the tensors as members named by their keys; numpy's ``load`` needs no pickle for them.

    bfloat16 and 8-bit floats become float32, complex32 complex64, exactly; ``__about__`` says what was.
    """
    dtypes: dict[str, str] = {}
    with zipfile.ZipFile(target, "x", zipfile.ZIP_STORED, allowZip64=True) as archive:
        for each in tensors:
            array = each.read()
            name = member_name(each.key)
            if array.dtype.name != each.dtype:
                dtypes[name] = each.dtype
            _add(archive, name, array)
        _add(archive, ABOUT, np.array(json.dumps(about | {"dtypes": dtypes})))


def member_name(key: str) -> str:
    """Return a key as a path that stays where a zip is unpacked, on any system."""
    parts = [part.replace("\\", "%5C").replace(":", "%3A") for part in key.split("/")]
    name = "/".join("%2E" * len(part) if set(part) == {"."} else part for part in parts)
    if len(name) <= _LONGEST:
        return name
    return f"{name[: _LONGEST // 2]}…{xxhash.xxh3_128_hexdigest(name.encode())}"


def _add(archive: zipfile.ZipFile, name: str, array: np.ndarray) -> None:
    with archive.open(zipfile.ZipInfo(f"{name}.npy"), "w", force_zip64=True) as out:
        np.lib.format.write_array(out, np.asanyarray(array), allow_pickle=False)
