"""The options of a recording as people write them, and the settings that they mean."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from msgspec.structs import replace

from tensortrace.tracer.errors import BadRequest
from tensortrace.tracer.full_at import full_at as rules_of_report
from tensortrace.tracer.nearest import meant, sibling
from tensortrace.tracer.options_flight import parse_flight
from tensortrace.tracer.selection import parse_promise
from tensortrace.tracer.settings import Compress, Pressure, Settings, Start, parse_size
from tensortrace.tracer.types import Promise


def resolve(
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
    dry_run: bool = False,
    eager: bool = False,
    layout: str | os.PathLike[str] | None = None,
    start: Start | None = None,
    keep_last: int = 0,
    trigger: str = "",
    after: int | None = None,
    dedup_replicas: bool = False,
) -> Settings:
    """Return the settings that these options of ``trace record`` mean; raise BadRequest naming a bad one.

    Sizes are texts such as ``512MiB``. A dry run records the first step whatever ``steps`` says.
    """
    buffer_bytes = parse_size(buffer, option="--buffer")
    if buffer_bytes == 0:
        raise BadRequest(
            "option --buffer", found=repr(buffer), expected="more than 0",
            remedy="16MiB is enough for small models; the default is 1GiB",
        )  # fmt: skip
    promise = parse_promise(
        steps="" if dry_run else steps, kinds=kinds, include=include, exclude=exclude,
        zoom=zoom, zoom_steps=zoom_steps,
    )  # fmt: skip
    promise = replace(promise, dedup_replicas=dedup_replicas)
    return Settings(
        root=str(Path(output).absolute()),
        promise=parse_flight(
            _with_levels(promise, tuple(level), full_at),
            keep_last=keep_last,
            trigger=trigger,
            after=after,
            max_bytes=max_bytes,
        ),
        buffer_bytes=buffer_bytes,
        on_pressure=on_pressure,
        max_bytes=None if max_bytes is None else parse_size(max_bytes, option="--max-bytes"),
        min_free_bytes=parse_size(min_free, option="--min-free"),
        compress=compress,
        strict=strict,
        dry_run=dry_run,
        eager=eager,
        layout=None if layout is None else str(Path(layout).absolute()),
        start=start or Start(),
    )


def _with_levels(promise: Promise, texts: tuple[str, ...], report: str | os.PathLike[str] | None) -> Promise:
    """Return the promise with its levels; beside steps that a report says to keep in full, sketches."""
    if not texts and report is None:
        return promise
    from tensortrace.tracer.levels import parse_levels  # needs numpy, which --help does not

    level, rules = parse_levels(texts or ("sketch",))
    return replace(promise, level=level, levels=rules + (rules_of_report(Path(report)) if report else ()))


def parse_start(
    *,
    init_from: Path | None,
    init_seed: int | None,
    dropout_seed: int | None,
    adversarial: bool,
    eager_attention: bool,
    pad_id: int | None,
) -> Start:
    """Return how a run shall begin; raise BadRequest for options that contradict each other."""
    if init_from is not None and (init_seed is not None or adversarial):
        raise BadRequest(
            "option --init-from", found="--adversarial" if adversarial else "--consistent-init",
            expected="one way to set parameters",
        )  # fmt: skip
    if init_from is not None and not init_from.is_dir():
        raise BadRequest(f"option --init-from: {init_from}: no such folder", remedy=meant(sibling(init_from)))
    if eager_attention and dropout_seed is None:
        raise BadRequest("option --eager-attention", expected="--consistent-dropout beside it")
    if pad_id is not None and dropout_seed is None:
        raise BadRequest("option --pad-id", expected="--consistent-dropout beside it")
    return Start(
        init_from=None if init_from is None else str(init_from.absolute()),
        init_seed=0 if adversarial and init_seed is None else init_seed,
        dropout_seed=dropout_seed,
        adversarial=adversarial,
        eager_attention=eager_attention,
        pad_id=pad_id,
    )
