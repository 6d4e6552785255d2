"""Records a part of a program from inside it: ``with tensortrace.tracer.record("a/"): train()``."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from tensortrace.tracer import layout as files
from tensortrace.tracer.errors import BadRequest

if TYPE_CHECKING:
    from tensortrace.tracer.settings import Compress, Pressure, Settings, Start
    from tensortrace.tracer.types import Manifest


@contextmanager
def record(
    output: str | os.PathLike[str],
    *,
    steps: str = "",
    kinds: str = "",
    include: Iterable[str] = (),
    exclude: Iterable[str] = (),
    zoom: Iterable[str] = (),
    zoom_steps: str = "",
    level: Iterable[str] = (),
    full_at: str | os.PathLike[str] | None = None,
    buffer: str = "1GiB",
    on_pressure: Pressure = "block",
    max_bytes: str | None = None,
    min_free: str = "1GiB",
    compress: Compress = "auto",
    strict: bool = False,
    eager: bool = False,
    layout: str | os.PathLike[str] | None = None,
    start: Start | None = None,
    keep_last: int = 0,
    trigger: str = "",
    after: int | None = None,
    dedup_replicas: bool = False,
) -> Iterator[None]:
    """Record what the body trains into the trace ``output``, which must not hold one yet.

    The options are those of ``trace record``; ``layout`` is a layout file's path (docs/layouts.md), ``start``
    changes where the run begins. Every rank of a distributed program calls this with the same ``output``,
    once it has its rank (``init_process_group``, or a launcher's ``RANK``); no collective is run. Steps,
    calls and names count from the beginning in each recording, and several may follow each other. When the
    body ends, also by an exception, all is written and torch is as it was.

    Raises LayoutFileError for a layout file that is none or is of another number of ranks, and BadRequest
    where an option is malformed, where this rank's part of ``output`` exists, and where the process is being
    recorded already. Later errors of the recorder end the recording only.
    """
    from tensortrace.tracer import bootstrap
    from tensortrace.tracer.options import resolve

    settings = resolve(
        output, steps=steps, kinds=kinds, include=include, exclude=exclude, zoom=zoom,
        zoom_steps=zoom_steps, level=level, full_at=full_at, buffer=buffer,
        on_pressure=on_pressure, max_bytes=max_bytes, min_free=min_free, compress=compress, strict=strict,
        eager=eager, layout=layout, start=start, keep_last=keep_last,
        trigger=trigger, after=after, dedup_replicas=dedup_replicas,
    )  # fmt: skip
    if bootstrap.Guest.present is not None:
        raise BadRequest(
            f"recording into {output}", found="a recording of this process already",
            remedy="end that one first: leave its `with` block, or start without `trace record`",
        )  # fmt: skip
    rank, world_size, _ = bootstrap.identify()
    _refuse_existing(Path(settings.root), rank)
    described = None if settings.layout is None else _checked(Path(settings.layout), world_size)
    manifest = _begin_manifest(settings, described) if rank == 0 else None
    guest = bootstrap.Guest(settings)
    error: BaseException | None = None
    try:
        guest.move_in()
        yield
    except BaseException as raised:
        error = raised
        raise
    finally:
        guest.move_out(bootstrap.ending(error))
        if manifest is not None:
            _finish_manifest(settings, manifest, failed=error is not None)


def _refuse_existing(root: Path, rank: int) -> None:
    """Each rank looks for what it would write itself: others may have begun to write theirs."""
    names = [path.name for path in root.iterdir()] if root.is_dir() else []
    held = [name for name in names if (parsed := files.parse_rank_folder(name)) and parsed[0] == rank]
    if held:
        raise BadRequest(f"output {root / held[0]} exists", remedy="choose another or remove it")


def _checked(path: Path, world_size: int) -> bytes:
    """Return the text of a layout file that fits this number of ranks."""
    from tensortrace.tracer.rules import RunLayout, read_text

    text = read_text(path)
    RunLayout.parse(text, path).check_world(world_size)
    return text


def _begin_manifest(settings: Settings, described: bytes | None) -> Manifest:
    from tensortrace.tracer import launch

    return launch.begin_trace(Path(settings.root), sys.argv, settings, os.environ, described)


def _finish_manifest(settings: Settings, manifest: Manifest, *, failed: bool) -> None:
    from tensortrace.tracer import launch, progress

    root = Path(settings.root)
    launch.finish_trace(root, manifest, int(failed), progress.look(root))
