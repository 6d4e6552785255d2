"""What a recording was asked to do: one record, handed to every rank in one environment variable."""

from __future__ import annotations

import re
from typing import Literal

import msgspec

from tensortrace.tracer.errors import BadRequest
from tensortrace.tracer.types import Promise, Record

VARIABLE = "TENSORTRACE_RECORD"
"""The environment variable that holds the settings as JSON; a process without it never records."""

FAULT_VARIABLE = "TENSORTRACE_FAULT"
"""For tests of the recorder only: the fault to inject (``docs/trust.md``)."""

GIB = 1 << 30

Compress = Literal["auto", "planes", "best", "none"]
Pressure = Literal["block", "drop"]

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(i?B?)", re.IGNORECASE)


class Start(Record, frozen=True, kw_only=True):
    """Where a run begins, as its user asked: all of it changes the run (``docs/start.md``).

    ``init_from`` is the absolute path of a trace. The seeds are of ``--consistent-init`` and
    ``--consistent-dropout``, to which ``eager_attention`` and ``pad_id`` belong.
    """

    init_from: str | None = None
    init_seed: int | None = None
    dropout_seed: int | None = None
    adversarial: bool = False
    eager_attention: bool = False
    pad_id: int | None = None

    def options(self) -> dict[str, str]:
        """Return the options in force by name, without their dashes, as they are written down."""
        values = {
            "init-from": self.init_from,
            "consistent-init": self.init_seed,
            "consistent-dropout": self.dropout_seed,
            "adversarial": self.adversarial or None,
            "eager-attention": self.eager_attention or None,
            "pad-id": self.pad_id,
        }
        return {name: str(value) for name, value in values.items() if value is not None}


Forced = Literal["inputs", "activation_grads", "params", "reduced_grads"]
"""What of a recorded run a live one can be given (``docs/replay.md``)."""


class Forcing(Record, frozen=True, kw_only=True):
    """What a live run is given of another run's trace in place of its own values: it changes the run.

    ``trace`` is that trace's absolute path; in the folder ``ledger`` each rank notes what it was given.
    """

    trace: str
    ledger: str
    kinds: tuple[Forced, ...] = ("inputs", "activation_grads", "params")


class Settings(Record, frozen=True, kw_only=True):
    """The options of one recording, as the launcher resolved them.

    ``root`` is the absolute path of the trace. Sizes are bytes per rank, except ``min_free_bytes``, which
    is what the recording leaves free on the file system. ``max_bytes`` of None is no limit. ``eager`` turns
    ``torch.compile`` off, so that every module is seen; it changes the run. ``layout`` is the absolute
    path of the layout file that describes the run, checked already; its ranks read it there. ``forcing`` is
    that of ``trace replay TRACE -- COMMAND``.
    """

    root: str
    promise: Promise = Promise()
    buffer_bytes: int = GIB
    on_pressure: Pressure = "block"
    max_bytes: int | None = None
    min_free_bytes: int = GIB
    compress: Compress = "auto"
    strict: bool = False
    dry_run: bool = False
    eager: bool = False
    layout: str | None = None
    start: Start = Start()
    forcing: Forcing | None = None


def encode(settings: Settings) -> str:
    """Return the settings as the value of ``VARIABLE``."""
    return msgspec.json.encode(settings).decode()


def decode(text: str) -> Settings:
    """Return the settings held by ``VARIABLE``; raise BadRequest where they are not ours."""
    try:
        return msgspec.json.decode(text, type=Settings)
    except msgspec.DecodeError as error:
        raise BadRequest(
            f"environment variable {VARIABLE}",
            found=str(error),
            remedy="launcher and training must use the same version of tensortrace",
        ) from error


def parse_size(text: str, *, option: str) -> int:
    """Return the bytes meant by ``512MiB``, ``1.5G`` (both binary), ``2GB`` (decimal) or a plain number."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise BadRequest(f"option {option}", found=repr(text), expected="a size such as 512MiB or 2GB")
    base = 1000 if match[2] and match[3].lower() == "b" else 1024
    return int(float(match[1]) * base ** " KMGT".index(match[2].upper() or " "))
