"""A data-parallel training program in numpy that leaves the trace a recorded torch program would.

The model is an embedding, a linear layer, tanh and a linear head with a cross-entropy loss over valid
tokens. Arithmetic is float32, and the order of every sum depends on the layout, as it does on real ranks,
so correct runs differ by round-off. A test plants a mistake by overriding one method of ``Program``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tensortrace.tracer.types import INIT_STEP, ROOT, Kind, Mesh, Meta, Placement, Shard
from tests.synthetic import Tensor, write_trace

VOCABULARY, WIDTH, HIDDEN = 23, 8, 12
PAD, IGNORE = 0, -100
NAMES = ("embed.weight", "hidden.weight", "hidden.bias", "head.weight", "head.bias")
BIASES = ("hidden.bias", "head.bias")
CLIP = "(clip)"

Arrays = dict[str, np.ndarray]
Documents = list[np.ndarray]


@dataclass(frozen=True)
class Setup:
    """What a user would choose; ``order`` seeds the order of sums, ``loss_scale`` is a GradScaler's."""

    ranks: int = 1
    accumulate: int = 1
    steps: int = 3
    order: int = 0
    optimizer: str = "AdamW"
    lr: float = 1e-2
    betas: tuple[float, float] = (0.9, 0.99)
    momentum: float = 0.9
    weight_decay: float = 0.1
    max_norm: float = 0.1
    norm_type: float = 2.0
    loss_scale: float | None = None
    resumed: bool = False
    noise: float = 0.0
    rows: int = 8


class At(NamedTuple):
    """Where a value stands, before it is recorded and used."""

    step: int
    rank: int
    microbatch: int | None
    kind: Kind
    name: str
    slot: str


class Part(NamedTuple):
    """One rank's microbatch: ids and targets [rows, positions], and the number of valid tokens."""

    ids: np.ndarray
    targets: np.ndarray
    count: int


class Program:
    """A correct program; ``write`` runs it and leaves its trace. Objects are used once."""

    def __init__(self, setup: Setup | None = None, **settings: Any) -> None:
        self.setup = setup or Setup(**settings)
        self.records: list[list[Tensor]] = [[] for _ in range(self.setup.ranks)]
        self.params = [self.initial_params(rank) for rank in range(self.setup.ranks)]
        self.state = [self.initial_state(rank) for rank in range(self.setup.ranks)]
        self.grads: list[Arrays] = [{} for _ in range(self.setup.ranks)]
        self._noise = np.random.default_rng(self.setup.order)

    # --- what a test overrides -------------------------------------------------------------------

    def tamper(self, at: At, value: np.ndarray) -> np.ndarray:
        """Return the value that is recorded and used instead of a correct one."""
        return value

    def keeps(self, at: At) -> bool:
        """Tell whether a boundary happens at all."""
        return True

    def documents(self, step: int) -> Documents:
        """Return the token sequences of one step, in the global order."""
        rng = np.random.default_rng(1000 + step)
        return [rng.integers(1, VOCABULARY, size=n) for n in rng.integers(3, 10, size=self.setup.rows)]

    def share(self, documents: Documents, rank: int, microbatch: int) -> Documents:
        """Return the documents that one rank sees in one microbatch."""
        own = documents[rank :: self.setup.ranks]
        return own[microbatch :: self.setup.accumulate]

    def token_weight(self, counts: dict[tuple[int, int], int], rank: int, microbatch: int) -> float:
        """Return ∂(backward root)/∂(one token's loss): DDP averages, so the loss is multiplied by ranks."""
        return self.setup.ranks / sum(counts.values())

    def mask(self, at: At, targets: np.ndarray) -> np.ndarray | None:
        """Return by what the program multiplies token losses; None where the function ignores some."""
        return None

    def hook(self, step: int, rank: int, name: str, value: np.ndarray) -> np.ndarray:
        """Return what a tensor hook of the program makes of a local gradient."""
        return value

    def reductions(self, name: str) -> Sequence[str]:
        """Return what is done to a gradient across ranks after the window: ``mean``, ``sum``, ``alone``."""
        return ("mean",) if self.setup.ranks > 1 else ()

    def clips_after(self, step: int, microbatch: int) -> bool:
        """Tell whether gradients are clipped after a microbatch."""
        return microbatch == self.setup.accumulate - 1

    def zeroes(self, step: int) -> bool:
        """Tell whether gradients are dropped after the update of a step."""
        return True

    def forgets(self, step: int, microbatch: int) -> bool:
        """Tell whether gradients are dropped after a microbatch."""
        return False

    def groups(self) -> list[tuple[tuple[str, ...], dict[str, float]]]:
        """Return the optimizer's groups: members and the hyperparameters that differ between them."""
        decayed = tuple(n for n in NAMES if n not in BIASES)
        return [(decayed, {"weight_decay": self.setup.weight_decay}), (BIASES, {"weight_decay": 0.0})]

    def position(self, step: int) -> int:
        """Return where the scheduler stands at the update of a step."""
        return step

    def updates(self, step: int, rank: int, name: str) -> bool:
        """Tell whether the optimizer's step changes a parameter."""
        return True

    def before_update(self, step: int, rank: int) -> None:
        """Do something to params or state after the forward passes, before the update."""

    def initial_params(self, rank: int) -> Arrays:
        """Return the parameters at the start."""
        rng = np.random.default_rng(7)
        shapes = ((VOCABULARY, WIDTH), (HIDDEN, WIDTH), (HIDDEN,), (VOCABULARY, HIDDEN), (VOCABULARY,))
        return {n: (0.5 * rng.normal(size=s)).astype(np.float32) for n, s in zip(NAMES, shapes, strict=True)}

    def initial_state(self, rank: int) -> dict[str, Arrays]:
        """Return the optimizer's state at the start: none, or that of a resumed run."""
        if not self.setup.resumed:
            return {}
        rng = np.random.default_rng(11)
        return {name: self._resumed(p, rng) for name, p in self.params[0].items()}

    # --- the program -----------------------------------------------------------------------------

    def write(self, root: Path, **fields: Any) -> Path:
        """Run the program and write its trace; ``fields`` go to ``write_trace``."""
        self.run()
        n = self.setup.ranks
        absent = {} if n > 1 else {"reduced_grad": "no reduction across ranks was seen"}
        if self.setup.loss_scale is None:
            absent["unscaled_grad"] = "no GradScaler was used"
        meshes = {"ddp": Mesh(("dp",), (n,), tuple(range(n)))} if n > 1 else {}
        return write_trace(root, self.records, **({"meshes": meshes, "absent": absent} | fields))

    def run(self) -> list[list[Tensor]]:
        """Run all steps; return the records of every rank."""
        for rank in range(self.setup.ranks):
            self._record_state(INIT_STEP, rank)
        for step in range(self.setup.steps):
            self._step(step)
        return self.records

    def _step(self, step: int) -> None:
        setup = self.setup
        places = [(r, m) for m in range(setup.accumulate) for r in range(setup.ranks)]
        documents = self.documents(step)
        parts = {place: collate(self.share(documents, *place)) for place in places}
        counts = {place: part.count for place, part in parts.items()}
        sums: list[Arrays] = [{} for _ in range(setup.ranks)]
        clips = 0
        for rank, microbatch in places:
            if microbatch == 0:
                state = np.full(4, step, np.uint8)
                self._put(At(step, rank, None, Kind.RNG, "cpu", "state"), state)
                self._record_leftovers(step, rank)
            weight = self.token_weight(counts, rank, microbatch) * (setup.loss_scale or 1.0)
            local = _Pass(self, step, rank, microbatch, parts[(rank, microbatch)], weight).run()
            for name, value in local.items():
                sums[rank][name] = _added(sums[rank].get(name), value)
                value = self._hooked(step, rank, microbatch, name, value)
                self.grads[rank][name] = _added(self.grads[rank].get(name), value)
            if self.forgets(step, microbatch):
                self.grads[rank] = {}
            last = microbatch == setup.accumulate - 1
            if rank == setup.ranks - 1 and not last and self.clips_after(step, microbatch):
                self._clip(step, microbatch, clips)
                clips += 1
        self._reduce(step)
        if self.clips_after(step, setup.accumulate - 1):
            self._clip(step, setup.accumulate - 1, clips)
        for rank in range(setup.ranks):
            self._update(step, rank, sums[rank])
            if self.zeroes(step):
                self.grads[rank] = {}

    def _record_leftovers(self, step: int, rank: int) -> None:
        for name, value in self.grads[rank].items():
            self._put(At(step, rank, None, Kind.LOCAL_GRAD, name, "start"), value)

    def _hooked(self, step: int, rank: int, microbatch: int, name: str, value: np.ndarray) -> np.ndarray:
        made = self.hook(step, rank, name, value)
        if made is value:
            return value
        at = At(step, rank, microbatch, Kind.LOCAL_GRAD, name, "hooked")
        return np.asarray(self._put(at, made, shard="partial"))

    def _reduce(self, step: int) -> None:
        last = self.setup.accumulate - 1
        for name in NAMES:
            for call, how in enumerate(self.reductions(name)):
                total = sum(grads[name] for grads in self.grads)
                for rank, grads in enumerate(self.grads):
                    value = {"sum": total, "mean": total / np.float32(len(self.grads)), "alone": grads[name]}
                    at = At(step, rank, last, Kind.REDUCED_GRAD, name, "grad")
                    meta = Meta(op="ddp" if call == 0 else "all_reduce", ranks=tuple(range(len(self.grads))))
                    grads[name] = self._put(at, value[how], call=call, meta=meta, shard="replicate")
        if self.setup.loss_scale is not None:
            self._unscale(step)

    def _unscale(self, step: int) -> None:
        last, scale = self.setup.accumulate - 1, np.float32(self.setup.loss_scale or 1.0)
        for rank, grads in enumerate(self.grads):
            for name in NAMES:
                at = At(step, rank, last, Kind.UNSCALED_GRAD, name, "grad")
                grads[name] = self._put(at, grads[name] / scale, shard="replicate")

    def _clip(self, step: int, microbatch: int, call: int) -> None:
        for rank, grads in enumerate(self.grads):
            norms = [np.linalg.norm(np.ravel(g), self.setup.norm_type) for g in grads.values()]
            total = float(np.linalg.norm(np.array(norms, np.float32), self.setup.norm_type))
            total = self._scalar(step, rank, microbatch, "total_norm", total, call)
            coefficient = min(1.0, self.setup.max_norm / (total + 1e-6))
            self._scalar(step, rank, microbatch, "max_norm", self.setup.max_norm, call)
            self._scalar(step, rank, microbatch, "norm_type", self.setup.norm_type, call)
            coefficient = self._scalar(step, rank, microbatch, "coefficient", coefficient, call)
            for name in list(grads):
                at = At(step, rank, microbatch, Kind.CLIPPED_GRAD, name, "before")
                grads[name] = self._put(at, grads[name], call=call, shard="replicate")
                at = at._replace(slot="grad")
                clipped = grads[name] * np.float32(coefficient)
                grads[name] = self._put(at, clipped, call=call, shard="replicate")

    def _scalar(self, step: int, rank: int, microbatch: int, slot: str, value: float, call: int) -> float:
        at = At(step, rank, microbatch, Kind.CLIPPED_GRAD, CLIP, slot)
        meta = Meta(members=NAMES, op="clip_grad_norm_")
        return float(self._put(at, np.float64(value), call=call, meta=meta))

    def _update(self, step: int, rank: int, sums: Arrays) -> None:
        for name, value in sums.items():
            self._record(At(step, rank, None, Kind.LOCAL_GRAD, name, "grad"), value, shard="partial")
        self.before_update(step, rank)
        grads = self.grads[rank]
        rate = self.setup.lr * 0.5 * (1 + math.cos(math.pi * self.position(step) / 20))
        for name, value in grads.items():
            grads[name] = self._put(
                At(step, rank, None, Kind.CLIPPED_GRAD, name, "grad"), value, shard="replicate"
            )
        for number, (members, own) in enumerate(self.groups()):
            hypers = self._hypers(rate) | own
            meta = Meta(members=members, optimizer=self.setup.optimizer)
            for slot, value in hypers.items():
                at = At(step, rank, None, Kind.SCHEDULE, f"optimizer.0.group.{number}", slot)
                hypers[slot] = float(self._put(at, np.float64(value), meta=meta))
            for name in members:
                if self.updates(step, rank, name):
                    self._update_one(rank, name, grads[name], hypers)
        self._record_schedule(step, rank)
        self._record_state(step, rank)

    def _record_schedule(self, step: int, rank: int) -> None:
        self._put(At(step, rank, None, Kind.SCHEDULE, "optimizer.0", "skipped"), np.int64(0))
        at = At(step, rank, None, Kind.SCHEDULE, "scheduler.0", "position")
        self._put(at, np.int64(self.position(step)), meta=Meta(module="LambdaLR"))
        if self.setup.loss_scale is not None:
            self._put(
                At(step, rank, None, Kind.SCHEDULE, "scaler.0", "scale"), np.float64(self.setup.loss_scale)
            )

    def _hypers(self, rate: float) -> dict[str, float]:
        if self.setup.optimizer == "SGD":
            momentum = {"momentum": self.setup.momentum, "dampening": 0.0, "nesterov": 0.0}
            return {"lr": rate, **momentum, "weight_decay": 0.0, "maximize": 0.0}
        first, second = self.setup.betas
        own = {"lr": rate, "betas.0": first, "betas.1": second, "eps": 1e-8, "weight_decay": 0.0}
        return own | {"amsgrad": 0.0, "maximize": 0.0}

    def _update_one(self, rank: int, name: str, gradient: np.ndarray, hypers: dict[str, float]) -> None:
        """Update in float32, in the order of torch's single-tensor optimizers."""
        param, f32 = self.params[rank][name], np.float32
        state = self.state[rank].setdefault(name, {})
        if self.setup.optimizer == "SGD":
            gradient = gradient + f32(hypers["weight_decay"]) * param
            if "momentum_buffer" in state:
                gradient = f32(hypers["momentum"]) * state["momentum_buffer"] + gradient
            state["momentum_buffer"] = gradient
            self.params[rank][name] = param - f32(hypers["lr"]) * gradient
            return
        rate, (first, second) = hypers["lr"], (hypers["betas.0"], hypers["betas.1"])
        average = state.get("exp_avg", np.zeros_like(param))
        squares = state.get("exp_avg_sq", np.zeros_like(param))
        step = float(state.get("step", 0.0)) + 1
        average = average + f32(1 - first) * (gradient - average)
        squares = f32(second) * squares + f32(1 - second) * gradient * gradient
        scale = np.sqrt(squares) / f32(math.sqrt(1 - second**step)) + f32(hypers["eps"])
        kept = param * f32(1 - rate * hypers["weight_decay"])
        self.params[rank][name] = kept - f32(rate / (1 - first**step)) * (average / scale)
        state |= {"step": np.float32(step), "exp_avg": average, "exp_avg_sq": squares}

    def _resumed(self, param: np.ndarray, rng: np.random.Generator) -> Arrays:
        noise = (0.01 * rng.normal(size=param.shape)).astype(np.float32)
        if self.setup.optimizer == "SGD":
            return {"momentum_buffer": noise}
        return {"step": np.float32(100), "exp_avg": noise, "exp_avg_sq": noise * noise + np.float32(1e-5)}

    def _record_state(self, step: int, rank: int) -> None:
        own = Meta(optimizer=self.setup.optimizer)
        for name in NAMES:
            for slot, value in self.state[rank].get(name, {}).items():
                at = At(step, rank, None, Kind.OPTIMIZER_STATE, name, slot)
                self.state[rank][name][slot] = self._put(at, value, meta=own, shard="replicate")
        for name in NAMES:
            at = At(step, rank, None, Kind.PARAM, name, "model")
            value = self._put(at, self.params[rank][name], meta=Meta(requires_grad=True), shard="replicate")
            self.params[rank][name] = value

    def _put(
        self,
        at: At,
        value: Any,
        *,
        call: int = 0,
        meta: Meta | None = None,
        shard: str | None = None,
        producers: tuple[int, ...] = (),
    ) -> Any:
        """Record a value as the program (mistaken or not) has it; return what it goes on with."""
        value = self.tamper(at, np.asarray(value))
        self._record(at, value, call=call, meta=meta, shard=shard, producers=producers)
        return value

    def _record(
        self,
        at: At,
        value: np.ndarray,
        *,
        call: int = 0,
        meta: Meta | None = None,
        shard: str | None = None,
        producers: tuple[int, ...] = (),
    ) -> None:
        """Record a value as it is: the recorder's own sums are of what the program had."""
        if not self.keeps(at):
            return
        fields: dict[str, Any] = {
            "step": at.step, "microbatch": at.microbatch, "kind": at.kind, "name": at.name,
            "slot": at.slot, "call": call, "producers": producers, "meta": meta or Meta(),
        }  # fmt: skip
        if shard and self.setup.ranks > 1:
            placement = {"replicate": Placement("replicate"), "partial": Placement("partial", op="sum")}
            placed = placement.get(shard, Placement("data"))
            shape = None if shard == "data" else value.shape
            fields["shard"] = Shard("ddp", (at.rank,), (placed,), shape)
        self.records[at.rank].append((fields, value))

    def matmul(self, x: np.ndarray, y: np.ndarray) -> np.ndarray:
        """Multiply in float32, summing in the layout's own order."""
        seed = (self.setup.order, self.setup.ranks, self.setup.accumulate)
        order = np.random.default_rng(seed).permutation(x.shape[-1])
        product: np.ndarray = x[..., order] @ y[order]
        if self.setup.noise:
            size = self.setup.noise * self._noise.normal(size=product.shape)
            product = product * (1 + size).astype(np.float32)
        return product


class _Pass:
    """One forward and backward pass of one rank's microbatch."""

    def __init__(
        self, program: Program, step: int, rank: int, microbatch: int, part: Part, weight: float
    ) -> None:
        self.program, self.part, self.weight = program, part, weight
        self.at = At(step, rank, microbatch, Kind.INPUT, ROOT, "in.0")
        self.events: dict[tuple[Kind, str, str], int] = {}

    def run(self) -> Arrays:
        """Record everything of the pass; return the local gradients."""
        params, mul = self.program.params[self.at.rank], self.program.matmul
        w1, w2 = params["hidden.weight"], params["head.weight"]
        ids = self._put(Kind.INPUT, ROOT, "in.0", self.part.ids)
        ids = self._put(Kind.ACTIVATION, ROOT, "in.0", ids, (Kind.INPUT, ROOT, "in.0"))
        x = self._module("embed", ids, (ROOT, "in.0"), lambda v: params["embed.weight"][v])
        h = self._module("hidden", x, ("embed", "out"), lambda v: mul(v, w1.T) + params["hidden.bias"])
        a = self._module("act", h, ("hidden", "out"), np.tanh)
        z = self._module("head", a, ("act", "out"), lambda v: mul(v, w2.T) + params["head.bias"])
        z = self._put(Kind.ACTIVATION, ROOT, "out", z, (Kind.ACTIVATION, "head", "out"))
        dz = self._loss(z)
        dz = self._grad(ROOT, "out", dz)
        dz = self._grad("head", "out", dz)
        da = self._grad("head", "in.0", mul(dz, w2))
        da = self._grad("act", "out", da)
        dh = self._grad("act", "in.0", da * (1 - a * a))
        dh = self._grad("hidden", "out", dh)
        dx = self._grad("hidden", "in.0", mul(dh, w1))
        dx = self._grad("embed", "out", dx)
        rows = [v.reshape(-1, v.shape[-1]) for v in (dz, a, dh, x, dx)]
        dz, a, dh, x, dx = rows
        table = np.zeros_like(params["embed.weight"])
        np.add.at(table, ids.reshape(-1), dx)
        local = {
            "head.weight": mul(dz.T, a), "head.bias": dz.sum(axis=0),
            "hidden.weight": mul(dh.T, x), "hidden.bias": dh.sum(axis=0), "embed.weight": table,
        }  # fmt: skip
        return {n: self._put(Kind.LOCAL_GRAD, n, "grad", v, shard="partial") for n, v in local.items()}

    def _module(self, name: str, value: np.ndarray, source: tuple[str, str], compute: Any) -> np.ndarray:
        value = self._put(Kind.ACTIVATION, name, "in.0", value, (Kind.ACTIVATION, *source))
        return self._put(Kind.ACTIVATION, name, "out", compute(value), (Kind.ACTIVATION, name, "in.0"))

    def _loss(self, logits: np.ndarray) -> np.ndarray:
        """Record the loss; return its gradient with respect to the logits."""
        logits_of = (Kind.ACTIVATION, ROOT, "out")
        mask = self.program.mask(self.at, self.part.targets.reshape(-1))
        meta = Meta(reduction="sum", ignore_index=IGNORE, denominator=1.0)
        targets = self.part.targets.reshape(-1)
        if mask is not None:
            meta, targets = Meta(reduction="none", ignore_index=IGNORE), np.maximum(targets, 0)
        targets = self._put(Kind.LOSS, "cross_entropy", "target", targets, meta=meta)
        flat = logits.reshape(-1, logits.shape[-1])
        shifted = flat - flat.max(axis=1, keepdims=True)
        logs = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
        valid = np.flatnonzero(targets != IGNORE)
        losses = -logs[valid, targets[valid]]
        total = losses.sum(dtype=np.float64)
        value = np.float32(total) if mask is None else losses.astype(np.float32)
        self._put(Kind.LOSS, "cross_entropy", "value", value, logits_of, meta=meta)
        self._put(Kind.LOSS, "cross_entropy", "sum", np.float64(total), logits_of, meta=meta)
        self._put(Kind.LOSS, "cross_entropy", "count", np.int64(len(valid)), meta=meta)
        kept = np.ones(len(valid)) if mask is None else mask
        root = np.float32((losses * kept).sum(dtype=np.float64) * self.weight)
        self._put(Kind.LOSS, "backward", "value", root, (Kind.LOSS, "cross_entropy", "value"))
        weight = np.float64(np.float32(self.weight)) * (1.0 if mask is None else mask)
        weight = self._put(Kind.LOSS, "cross_entropy", "weight", weight, meta=meta)
        gradient = np.zeros_like(flat)
        gradient[valid] = np.exp(logs[valid])
        gradient[valid, targets[valid]] -= 1
        return (gradient * np.float32(weight).reshape(-1, 1)).reshape(logits.shape)

    def _grad(self, name: str, slot: str, value: np.ndarray) -> np.ndarray:
        return self._put(Kind.ACTIVATION_GRAD, name, slot, value)

    def _put(
        self,
        kind: Kind,
        name: str,
        slot: str,
        value: Any,
        *sources: tuple[Kind, str, str],
        meta: Meta | None = None,
        shard: str = "data",
    ) -> Any:
        at = self.at._replace(kind=kind, name=name, slot=slot)
        producers = tuple(self.events[s] for s in sources if s in self.events)
        before = len(self.program.records[at.rank])
        value = self.program._put(at, value, meta=meta, shard=shard, producers=producers)
        if len(self.program.records[at.rank]) > before:
            self.events[(kind, name, slot)] = before
        return value


def collate(documents: Documents) -> Part:
    """Pad documents to the longest: ids are all tokens but the last, targets all but the first."""
    width = max(len(d) for d in documents) - 1
    ids = np.full((len(documents), width), PAD, np.int64)
    targets = np.full((len(documents), width), IGNORE, np.int64)
    for row, document in enumerate(documents):
        ids[row, : len(document) - 1] = document[:-1]
        targets[row, : len(document) - 1] = document[1:]
    return Part(ids, targets, int(np.count_nonzero(targets != IGNORE)))


def _added(total: np.ndarray | None, value: np.ndarray) -> np.ndarray:
    return value.copy() if total is None else total + value
