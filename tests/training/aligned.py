"""Trainings whose steps, rows or code are cut otherwise but mean the same, many recordings in one process.

    torchrun --nproc-per-node 2 aligned.py FOLDER NAME:KEY=VALUE,… …

Each case trains the same small decoder from the same weights on the same documents and objective (the mean
over all valid tokens of a step), and leaves its trace in ``FOLDER/NAME``. ``save=NAME@STEP`` leaves a torch
DCP checkpoint after that many steps, ``resume=NAME`` begins from it, on any number of ranks.
"""

from __future__ import annotations

import gc
import math
import os
import sys
import warnings
from dataclasses import dataclass, fields
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DistributedSampler

from tensortrace import tracer

WORLD, RANK = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
VOCABULARY, WIDTH, HEADS, HIDDEN, LENGTH = 23, 12, 2, 20, 12
PAD, IGNORE = 0, -100
RATE, WARM_UP, MAX_NORM = 0.02, 4, 0.6


@dataclass
class Settings:
    """What one case does otherwise."""

    steps: int = 3
    rows: int = 8
    wrap: str = "ddp"  # or fsdp2; nothing on one rank
    split: int = 1  # microbatches
    sampler: str = "interleaved"  # contiguous, shuffled, padded (DistributedSampler)
    repeat: int = 0  # the last row is the first again
    padded: int = 0  # every microbatch to at least this length
    filler: int = 0  # rows of nothing but padding behind each microbatch's own
    values: int = 0  # rows are float vectors, not token ids
    noise: float = 0.0  # added to these, so that they are not the same bits
    attention: str = "sdpa"  # hand
    projections: str = "fused"  # apart
    norm: str = "torch"  # hand
    loss: str = "torch"  # hand
    optimizer: str = "foreach"  # fused, loop
    dropout: float = 0.0
    average: int = 0  # an exponential moving average of the weights is kept
    save: str = ""
    resume: str = ""
    plant: str = (
        ""  # moments, scheduler, data, generator, counter, average: what a resumed run does not restore
    )

    @classmethod
    def parse(cls, text: str) -> Settings:
        kinds = {field.name: type(field.default) for field in fields(cls)}
        pairs = (part.split("=") for part in text.split(",") if part)
        return cls(**{name: kinds[name](value) for name, value in pairs})


class HandNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        centred = x - x.mean(-1, keepdim=True)
        return centred * (centred.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * self.weight + self.bias


class Attention(nn.Module):
    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self.by_hand = settings.attention == "hand"
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        if settings.projections == "apart":
            whole = self.qkv
            del self.qkv
            with torch.random.fork_rng():
                self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
            with torch.no_grad():
                for part, weight, bias in zip(
                    (self.q, self.k, self.v), whole.weight.chunk(3), whole.bias.chunk(3), strict=True
                ):
                    part.weight.copy_(weight)
                    part.bias.copy_(bias)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, _ = x.shape
        three = self.qkv(x).chunk(3, -1) if hasattr(self, "qkv") else (self.q(x), self.k(x), self.v(x))
        query, key, value = (part.view(rows, length, HEADS, -1).transpose(1, 2) for part in three)
        if self.by_hand:
            scores = query @ key.transpose(-1, -2) / math.sqrt(query.shape[-1])
            later = torch.ones(length, length, dtype=torch.bool).triu(1)
            mixed = scores.masked_fill(later, -math.inf).softmax(-1) @ value
        else:
            mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(rows, length, WIDTH))


class Block(nn.Module):
    def __init__(self, settings: Settings) -> None:
        super().__init__()
        norm = HandNorm if settings.norm == "hand" else nn.LayerNorm
        self.attention_norm, self.attention = norm(WIDTH), Attention(settings)
        self.mlp_norm = norm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)
        self.dropout = nn.Dropout(settings.dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.attention_norm(x)))
        return x + self.dropout(self.down(F.gelu(self.up(self.mlp_norm(x)))))


class Decoder(nn.Module):
    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block(settings) for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens) + self.position(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Regressor(nn.Module):
    """Of rows that are float vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, VOCABULARY))

    def forward(self, rows: Tensor) -> Tensor:
        return self.body(rows)


Row = tuple[Tensor, Tensor]


def global_rows(step: int, settings: Settings) -> list[Row]:
    """Return the step's (inputs, targets), the same whatever the number of ranks."""
    numbers = torch.Generator().manual_seed(100 + step)
    if settings.values:
        values = torch.randn(settings.rows, WIDTH, generator=numbers)
        labels = torch.randint(0, VOCABULARY, (settings.rows, 1), generator=numbers)
        return list(zip(values * (1 + settings.noise), labels, strict=True))
    lengths = torch.randint(4, LENGTH + 1, (settings.rows,), generator=numbers).tolist()
    rows = [torch.randint(1, VOCABULARY, (length + 1,), generator=numbers) for length in lengths]
    rows = [*rows[:-1], rows[0]] if settings.repeat else rows
    return [(row[:-1], row[1:]) for row in rows]


def share(rows: list[Row], step: int, settings: Settings) -> list[Row]:
    """Return this rank's rows."""
    if settings.sampler == "contiguous":
        size = len(rows) // WORLD
        return rows[RANK * size : (RANK + 1) * size]
    if settings.sampler == "shuffled":
        order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(step))
        rows = [rows[i] for i in order]
    if settings.sampler == "padded":
        return [rows[i] for i in DistributedSampler(range(len(rows)), WORLD, RANK, shuffle=False)]
    return rows[RANK::WORLD]


def collate(rows: list[Row], settings: Settings) -> Row:
    if settings.values:
        return torch.stack([x for x, _ in rows]), torch.stack([y for _, y in rows])
    longest = max(settings.padded, *(len(x) for x, _ in rows))
    inputs = torch.full((len(rows) + settings.filler, longest), PAD)
    targets = torch.full_like(inputs, IGNORE)
    for number, (x, y) in enumerate(rows):
        inputs[number, : len(x)], targets[number, : len(y)] = x, y
    return inputs, targets


def loss_sum(logits: Tensor, targets: Tensor, settings: Settings) -> Tensor:
    logits, targets = logits.reshape(-1, VOCABULARY), targets.reshape(-1)
    if settings.loss == "torch":
        return F.cross_entropy(logits, targets, ignore_index=IGNORE, reduction="sum")
    chosen = logits.log_softmax(-1).gather(-1, targets.clamp(min=0)[:, None])[:, 0]
    return -(chosen * (targets != IGNORE)).sum()


class Training:
    """A model with its optimizer and scheduler, and where in the data they are."""

    def __init__(self, settings: Settings, folder: Path) -> None:
        self.settings, self.folder, self.step, self.left = settings, folder, 0, settings.steps
        self.model: nn.Module = Regressor() if settings.values else Decoder(settings)
        self.wrap()
        how = {"foreach": {"foreach": True}, "fused": {"fused": True}, "loop": {"foreach": False}}
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=RATE, betas=(0.8, 0.9), weight_decay=0.1, **how[settings.optimizer]
        )
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda step: min(1.0, (step + 1) / WARM_UP) * 0.97**step
        )
        self.average: AveragedModel | None = None
        if settings.average:
            self.average = AveragedModel(self.model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        if settings.resume:
            self.load(folder / f"{settings.resume}.checkpoint")

    def wrap(self) -> None:
        if WORLD == 1:
            return
        if self.settings.wrap == "ddp":
            self.model = DistributedDataParallel(self.model)
            return
        for block in self.model.blocks:
            fully_shard(block)
        fully_shard(self.model)

    def state(self) -> dict[str, object]:
        weights, moments = get_state_dict(self.model, self.optimizer)
        beside = {
            "scheduler": self.scheduler.state_dict()["last_epoch"],
            "step": self.step,
            "generator": torch.get_rng_state(),
        }
        averaged = {} if self.average is None else {"average": self.average.state_dict()}
        return {"model": weights, "optimizer": moments, "beside": beside} | averaged

    def load(self, path: Path) -> None:
        plant, held = self.settings.plant, self.state()
        if plant == "average":
            del held["average"]  # what is loaded is loaded in place
        dcp.load(held, checkpoint_id=path)
        set_state_dict(
            self.model, self.optimizer, model_state_dict=held["model"], optim_state_dict=held["optimizer"]
        )
        beside = held["beside"]
        if self.average is not None and plant != "average":
            self.average.load_state_dict(held["average"])
        if plant == "moments":
            for state in self.optimizer.state.values():
                state["exp_avg"].zero_()
        if plant == "counter":
            for state in self.optimizer.state.values():
                state["step"].zero_()
        if plant == "optimizer":
            self.optimizer.state.clear()
        position = 0 if plant == "scheduler" else beside["scheduler"]
        self.scheduler.last_epoch = position
        for group, base in zip(self.optimizer.param_groups, self.scheduler.base_lrs, strict=True):
            group["lr"] = base * self.scheduler.lr_lambdas[0](position)
        self.step = 0 if plant == "data" else beside["step"]
        self.left -= beside["step"]
        if plant != "generator":
            torch.set_rng_state(beside["generator"])

    def run(self) -> None:
        name, _, at = self.settings.save.partition("@")
        for _ in range(self.left):
            self.update()
            if name and self.step == int(at):
                dcp.save(self.state(), checkpoint_id=self.folder / f"{name}.checkpoint")

    def update(self) -> None:
        settings = self.settings
        rows = global_rows(self.step, settings)
        mine = share(rows, self.step, settings)
        total = sum(len(y) for _, y in rows)
        if settings.sampler == "padded":
            total = summed(sum(len(y) for _, y in mine))
        size = -(-len(mine) // settings.split)
        for start in range(0, len(mine), size):
            inputs, targets = collate(mine[start : start + size], settings)
            loss = loss_sum(self.model(inputs), targets, settings)
            (loss * (WORLD / total)).backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), MAX_NORM)
        self.optimizer.step()
        self.scheduler.step()
        if self.average is not None:
            self.average.update_parameters(self.model)
        self.optimizer.zero_grad()
        self.step += 1


def summed(count: int) -> int:
    total = torch.tensor(count)
    if WORLD > 1:
        dist.all_reduce(total)
    return int(total)


def main() -> None:
    folder = Path(sys.argv[1])
    if WORLD > 1:
        dist.init_process_group("gloo")
    for case in sys.argv[2:]:
        name, _, text = case.partition(":")
        torch.manual_seed(0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # DCP warns of running without ranks
            with tracer.record(folder / name, min_free="0", buffer="64MiB"):
                training = Training(Settings.parse(text), folder)
                training.run()
        del training
        gc.collect()  # a DDP module that outlives its group may abort at exit
    if WORLD > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
