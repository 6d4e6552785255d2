"""Plain records of a trace: keys, meshes, placements, shards, index entries.

Every record is a frozen msgspec Struct: it is validated once, when it is decoded, and unknown keys
are refused. This module imports no torch. Shapes and offsets count elements; ``axis`` belongs to a
mesh, ``dim`` to a tensor, ``rank`` is global.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Literal, NamedTuple

from msgspec import Struct

INIT_STEP = -1
"""The pseudo-step ``init``: the state before the first step. Shown to people as ``init``."""

ROOT = "(root)"
"""Canonical name of the root module, whose FQN is the empty string."""

COUPLES_ROWS = "batch"
"""``meta.op`` of the activations of a module that computes statistics over its rank's batch."""

OF_RECORDED = "direct"
"""``meta.op`` of a loss whose scores are a recorded tensor's values: no rounding lies between the two."""

SOLE = "sole"
"""``meta.op`` of a gradient that one call of a module brought alone: nothing else used the tensor."""

SCORES = "scores="
"""How ``meta.text`` of a loss begins whose scores are one recorded tensor in its order: with their shape."""

WEIGHTED = "weighted"
"""``meta.text`` of a loss that was given weights of its classes or elements."""

PART_OF_LOSS = "part"
"""``meta.op`` of a loss found in a graph that uses the same log-probabilities for something else, too."""


COMPILED = "compiled"
"""``meta.text`` of the activations of a compiled module: the calls inside its graph are not observed."""

STAGE = "(stage "
"""How the name of a pipeline stage's own module begins, as in ``(stage 1)``: no other program has it."""


class Kind(StrEnum):
    """The kinds of boundary, in the usual order of the ladder."""

    INPUT = "input"
    ACTIVATION = "activation"
    LOSS = "loss"
    ACTIVATION_GRAD = "activation_grad"
    LOCAL_GRAD = "local_grad"
    REDUCED_GRAD = "reduced_grad"
    UNSCALED_GRAD = "unscaled_grad"
    CLIPPED_GRAD = "clipped_grad"
    SCHEDULE = "schedule"
    OPTIMIZER_STATE = "optimizer_state"
    PARAM = "param"
    BUFFER = "buffer"
    RNG = "rng"
    COLLECTIVE = "collective"
    OPERATION = "operation"
    OPERATION_GRAD = "operation_grad"


LADDER: tuple[Kind, ...] = tuple(Kind)[: tuple(Kind).index(Kind.PARAM) + 1]
"""The rungs of the ladder, in order; the kinds after ``param`` stand beside it."""


class Key(NamedTuple):
    """What identifies a boundary within a run; ``microbatch`` is None for what belongs to the window."""

    step: int
    microbatch: int | None
    kind: Kind
    name: str
    slot: str
    call: int


class Record(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, gc=False):
    """Base of all records that are written to files.

    None is part of a cycle, so the garbage collector, which runs more often the more it has to look after in
    the program that is recorded, needs to know of none.
    """


class Mesh(Record, frozen=True):
    """A grid of ranks: axis names, axis sizes and the global ranks in row-major order."""

    axes: tuple[str, ...]
    shape: tuple[int, ...]
    ranks: tuple[int, ...]


class Placement(Record, frozen=True):
    """How a tensor lies along one mesh axis.

    ``replicate``: equal copies. ``shard``: contiguous blocks of ``dim``. ``strided_shard``: as torch's
    _StridedShard, with ``split_factor``. ``partial``: the global value is the reduction ``op`` over the
    axis. ``flat``: an interval of the flattened tensor. ``data``: the axis carries different samples,
    so the rows that a rank holds are its own and are found by identity, not by offset.
    """

    kind: Literal["replicate", "shard", "strided_shard", "partial", "flat", "data"]
    dim: int | None = None
    split_factor: int | None = None
    op: str | None = None


class Box(Record, frozen=True):
    """A rectangular part of the global tensor: offset and shape per dimension, in elements."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]


class Shard(Record, frozen=True):
    """Where one rank's tensor lies in the global tensor.

    ``mesh`` is a key of ``RankManifest.meshes``; ``coordinate`` is this rank's, one number per axis of the
    mesh, as is ``placements``. ``global_shape`` is the logical tensor's over the axes that aren't ``data``;
    None where no rank can know it (the rows of a data-parallel batch). ``boxes`` are empty where the
    placements say it all, as DTensor cuts; else they are the parts whose product is the local tensor, in
    the order of its elements. Of a ``flat`` part the box is an interval of the flattened global tensor.
    ``padding`` counts trailing local elements per dimension that are not of the global tensor. See
    ``docs/format.md``.
    """

    mesh: str
    coordinate: tuple[int, ...]
    placements: tuple[Placement, ...]
    global_shape: tuple[int, ...] | None = None
    boxes: tuple[Box, ...] = ()
    padding: tuple[int, ...] = ()


class Stats(Record, frozen=True):
    """Statistics of one local tensor over its finite elements, accumulated in float64.

    ``minimum``, ``maximum``, ``mean`` and ``l2`` are None where no element is finite or the dtype is
    not numeric.
    """

    finite: int
    nan: int = 0
    inf: int = 0
    minimum: float | None = None
    maximum: float | None = None
    mean: float | None = None
    l2: float | None = None


class Blob(Record, frozen=True):
    """Where a tensor's bytes lie: byte range of its frames in a segment, and how they are encoded.

    ``codec`` is ``raw`` (logical bytes) or ``planes`` (byte planes, U8 of shape [itemsize, *shape]);
    either way the bytes are inside standard Zstandard frames.
    """

    segment: int
    offset: int
    length: int
    raw_length: int
    codec: Literal["raw", "planes"]


class Sketch(Record, frozen=True):
    """Numbers that stand for a tensor where it was not stored; see ``docs/format.md``.

    ``values`` are base64 of ``size[0] * size[1]`` little-endian numbers of ``dtype``, row-major. ``rows`` is
    the local dimension whose indices are identities of samples; with ``positions`` each sample has so many
    consecutive indices of it. Without ``rows`` all indices are those that the shard gives.
    """

    values: str
    dtype: Literal["float32", "float64"] = "float32"
    size: tuple[int, int] = (16, 16)
    rows: int | None = None
    positions: int | None = None


class Meta(Record, frozen=True):
    """What is known of a boundary beside its value; every field is optional.

    See ``docs/recording.md`` for which kinds carry which field.
    """

    training: bool | None = None
    grad_enabled: bool | None = None
    autocast: str | None = None
    source: str | None = None
    module: str | None = None
    aliases: tuple[str, ...] = ()
    requires_grad: bool | None = None
    members: tuple[str, ...] = ()
    total: bool = False
    reduction: str | None = None
    ignore_index: int | None = None
    denominator: float | None = None
    assumed: bool = False
    op: str | None = None
    ranks: tuple[int, ...] = ()
    optimizer: str | None = None
    text: str | None = None
    arguments: tuple[str, ...] = ()


class Boundary(Record, frozen=True, kw_only=True):
    """One tensor at one boundary on one rank, as the recorder states it, before it is stored.

    ``event`` numbers the boundaries of a rank in the order in which they happened, from 0.
    ``producers`` are the events (of the same rank) whose tensors this one was computed from.
    """

    event: int
    step: int
    microbatch: int | None
    kind: Kind
    name: str
    slot: str
    dtype: str
    local_shape: tuple[int, ...]
    call: int = 0
    recompute: bool = False
    shard: Shard | None = None
    producers: tuple[int, ...] = ()
    meta: Meta = Meta()

    @property
    def key(self) -> Key:
        """The key under which this boundary meets its counterpart in another run."""
        return Key(self.step, self.microbatch, self.kind, self.name, self.slot, self.call)


class Entry(Boundary, frozen=True, kw_only=True):
    """One line of a rank's index: a boundary and where its bytes lie.

    Exactly one of ``blob`` and ``same_as`` is set where the value was stored; neither where only its
    digest and statistics, and maybe its sketch, were kept. ``shard_ref`` and ``sketch_ref`` name the events
    whose lines have the same shard or sketch; the reader replaces them with these. ``digest`` is xxh3-128 in
    hex (see ``docs/format.md``).
    """

    digest: str
    stats: Stats | None = None
    sketch: Sketch | None = None
    blob: Blob | None = None
    same_as: int | None = None
    shard_ref: int | None = None
    sketch_ref: int | None = None


class LevelRule(Record, frozen=True):
    """How much is kept of some kinds (none: of all) in some steps (none: in all), as ``Promise.level`` is."""

    level: str
    kinds: tuple[Kind, ...] = ()
    steps: tuple[tuple[int, int], ...] = ()


class Promise(Record, frozen=True):
    """What the user selected, so that a reader can tell a deselected boundary from a lost one.

    ``steps`` are inclusive [first, last] ranges, empty for all; ``kinds`` empty for all; ``include`` and
    ``exclude`` are globs on canonical names. ``zoom`` are globs on the modules whose operations are recorded,
    in the steps ``zoom_steps``. ``level`` is how much is kept of a tensor: ``full``, ``sketch`` (of another
    size than 16x16: ``sketch:8x8``) or ``stats``; of ``levels`` that fit a boundary the last holds instead.
    Where ``keep_last`` is not 0, so many steps are kept: the last ones, or those up to what set off one of
    ``triggers`` and ``after`` further ones; ``RankManifest.window`` says which.
    With ``dedup_replicas`` the bytes of declared copies are stored by the first rank that has one.
    """

    steps: tuple[tuple[int, int], ...] = ()
    kinds: tuple[Kind, ...] = ()
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    level: str = "full"
    levels: tuple[LevelRule, ...] = ()
    zoom: tuple[str, ...] = ()
    zoom_steps: tuple[tuple[int, int], ...] = ()
    keep_last: int = 0
    after: int = 0
    triggers: tuple[str, ...] = ()
    dedup_replicas: bool = False


class Triggered(Record, frozen=True, kw_only=True):
    """What ended a recording that keeps the last steps: which trigger, where and when.

    ``at`` is seconds since the epoch. ``event`` and ``key`` fields are those of the boundary that set it off;
    a signal has none. ``text`` says what was found.
    """

    trigger: str
    step: int
    at: float
    text: str = ""
    event: int | None = None
    microbatch: int | None = None
    kind: Kind | None = None
    name: str | None = None
    slot: str | None = None


class Window(Record, frozen=True):
    """Which steps a rank kept of those that it recorded (``Promise.keep_last``).

    Those before ``first`` were dropped on purpose (INIT_STEP: none was); ``last`` is set once a trigger has
    ended the recording after that step. ``notes`` say which trigger could not work, and why.
    """

    first: int = INIT_STEP
    last: int | None = None
    triggered: Triggered | None = None
    notes: tuple[str, ...] = ()


class Environment(Record, frozen=True):
    """What surrounded a run, for attribution. Values of variables are allow-listed and masked."""

    versions: dict[str, str] = {}
    flags: dict[str, str] = {}
    variables: dict[str, str] = {}
    command: tuple[str, ...] = ()
    commit: str | None = None
    dirty: bool | None = None


class Drops(Record, frozen=True):
    """Boundaries that were promised and not stored, by reason: counts and bytes."""

    count: int = 0
    size_bytes: int = 0
    reasons: dict[str, int] = {}


Setting = bool | int | float | str | tuple[int, ...] | None
"""A plain setting of a module, as its constructor was given it."""


class Module(Record, frozen=True):
    """What is known of modules of ``torch.nn``, beside their parameters: the class's name and the settings.

    ``names`` are the modules of which all this holds. ``odd`` says why their calls need not be what class and
    settings say (hooks of the program, another ``forward``, settings that changed while it was recorded).
    """

    kind: str
    settings: dict[str, Setting] = {}
    odd: str = ""
    names: tuple[str, ...] = ()


class RankManifest(Record, frozen=True, kw_only=True):
    """``rank.json``: what one rank knows of itself. ``ended`` is None while the rank is running.

    ``absent`` maps a kind to the reason why this run has no such rung ("one rank, no reduction").
    ``ended`` is one of ``finished``, ``failed: REASON`` (the recorder stood down; training went on),
    ``exception: TYPE`` (the program raised). ``window`` is there where not all recorded steps are kept.
    ``modules`` are those of ``torch.nn``'s own classes that were called.
    """

    format: int
    rank: int
    world_size: int
    attempt: int = 0
    pid: int = 0
    host: str = ""
    device: str = "cpu"
    steps: int = 0
    boundaries: int = 0
    meshes: dict[str, Mesh] = {}
    promise: Promise = Promise()
    absent: dict[str, str] = {}
    drops: Drops = Drops()
    environment: Environment = Environment()
    ended: str | None = None
    ignorable: tuple[str, ...] = ()
    window: Window | None = None
    modules: tuple[Module, ...] = ()


class Manifest(Record, frozen=True, kw_only=True):
    """``trace.json``: what the launcher knows. ``exit_code`` and ``ended_at`` are None while it runs.

    Times are seconds since the epoch. ``ranks`` lists the rank folders seen when the run ended.
    """

    format: int
    run_id: str
    command: tuple[str, ...]
    started_at: float
    promise: Promise = Promise()
    environment: Environment = Environment()
    ranks: tuple[str, ...] = ()
    exit_code: int | None = None
    ended_at: float | None = None
    ignorable: tuple[str, ...] = ()
