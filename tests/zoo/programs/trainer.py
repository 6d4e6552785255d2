"""Train a small decoder, alone or data parallel: accumulation, loss scale, clipping, schedule, resume.

    python trainer.py --plant NAME
    torchrun --nproc-per-node 2 trainer.py --spread fsdp2

What a step computes does not depend on how it is spread. ``--plant`` plants a mistake that people have made,
in block ``--at`` or from step ``--since`` on where it has a place.
"""

from __future__ import annotations

import argparse
import contextlib
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook, fp16_compress_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from trainer_model import PAD, Decoder, build

STEPS_PER_EPOCH = 2
RANK, WORLD = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--spread", choices=["ddp", "fsdp1", "fsdp2", "hsdp", "zero1"], default="ddp")
    add("--plant", default="")
    add("--at", type=int, default=0)
    add("--since", type=int, default=0)
    add("--steps", type=int, default=3)
    add("--seed", type=int, default=0)
    add("--width", type=int, default=16)
    add("--heads", type=int, default=2)
    add("--depth", type=int, default=2)
    add("--hidden", type=int, default=13)
    add("--vocabulary", type=int, default=37)
    add("--length", type=int, default=12)
    add("--rows", type=int, default=8)
    add("--even", action="store_true", help="no row is padded")
    add("--accumulate", type=int, default=1)
    add("--dropout", type=float, default=0.0)
    add("--checkpoint", action="store_true")
    add("--scale", type=float, default=0.0, help="initial scale of a GradScaler")
    add("--max-norm", type=float, default=0.1)
    add("--no-clip", action="store_true")
    add("--resume", action="store_true", help="go on from a checkpoint after 7 steps")
    return parser.parse_args()


def documents(options: argparse.Namespace) -> list[list[int]]:
    """Return the documents of an epoch, each with the token that ends it."""
    drawn = torch.Generator().manual_seed(options.seed)

    def draw(low: int, high: int, size: int) -> list[int]:
        return torch.randint(low, high, (size,), generator=drawn).tolist()

    count = options.rows * STEPS_PER_EPOCH
    lengths = [options.length] * count if options.even else draw(3, options.length + 1, count)
    return [draw(1, options.vocabulary, length + 1) for length in lengths]


class Trainer:
    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.plant = options, options.plant
        self.documents = documents(options)
        self.inner = build(options, RANK)
        self.model: nn.Module = self.wrap(self.inner) if WORLD > 1 else self.inner
        self.optimizer = self.make_optimizer()
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda n: 0.9**n)
        self.scaler = torch.amp.GradScaler(
            "cpu", init_scale=options.scale or 1.0, enabled=bool(options.scale)
        )
        if options.resume:
            self.load()
        if not options.resume or self.plant == "generator-not-restored":
            torch.manual_seed(options.seed + (0 if self.plant == "seeded-alike" else RANK))

    def wrap(self, model: Decoder) -> nn.Module:
        if self.options.spread in ("ddp", "zero1"):
            return self.wrap_replicas(model)
        if self.options.spread == "fsdp1":
            kept = {"device_id": torch.device("cpu"), "use_orig_params": True}
            ignored = [model.norm] if self.plant == "norm-ignored" else None
            for number, block in enumerate(model.blocks):
                model.blocks[number] = FullyShardedDataParallel(block, **kept)
            return FullyShardedDataParallel(model, ignored_modules=ignored, **kept)
        mesh = init_device_mesh("cpu", (WORLD,), mesh_dim_names=("shard",))
        if self.options.spread == "hsdp":
            mesh = init_device_mesh("cpu", (2, WORLD // 2), mesh_dim_names=("replicate", "shard"))
            mesh = mesh["shard"] if self.plant == "replicas-forgotten" else mesh
        policy = MixedPrecisionPolicy(
            reduce_dtype=torch.bfloat16 if self.plant == "reduced-in-bf16" else None
        )
        for part in (*model.blocks, model):
            fully_shard(part, mesh=mesh, mp_policy=policy)
        for part in model.modules():
            if self.plant == "sum-for-mean" and isinstance(part, FSDPModule):
                part.set_gradient_divide_factor(1.0)
                part.set_force_sum_reduction_for_comms(True)
        return model

    def wrap_replicas(self, model: Decoder) -> nn.Module:
        if self.plant == "added-after-wrapping":
            name = f"blocks.{self.options.at}.mlp_norm.weight"
            DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, [name])
        wrapped = DistributedDataParallel(model)
        if self.plant == "reduced-in-fp16":
            wrapped.register_comm_hook(None, fp16_compress_hook)
        if self.plant == "reduced-in-bf16":
            wrapped.register_comm_hook(None, bf16_compress_hook)
        return wrapped

    def make_optimizer(self) -> torch.optim.Optimizer:
        named = list(self.model.named_parameters())
        if self.plant == "made-before-the-head":
            named = [(name, p) for name, p in named if "head" not in name]
        decayed = [p for name, p in named if decays(name) or self.plant == "norms-decay"]
        plain = [p for name, p in named if not any(p is other for other in decayed)]
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}]
        settings = {"lr": 3e-3, "betas": (0.95, 0.9) if self.plant == "betas-swapped" else (0.9, 0.95)}
        kind = torch.optim.Adam if self.plant == "adam-for-adamw" else torch.optim.AdamW
        if self.options.spread == "zero1" and WORLD > 1:
            return self.sharded(ZeroRedundancyOptimizer(groups, kind, **settings))
        return kind([group for group in groups if group["params"]], **settings)

    def sharded(self, zero: ZeroRedundancyOptimizer) -> ZeroRedundancyOptimizer:
        """Leave one parameter out of what owners send to the other ranks, where planted."""
        if self.plant != "not-broadcast":
            return zero
        weight, send = self.inner.blocks[self.options.at].mlp.up.weight, zero._sync_params
        own = any(p is weight for group in zero.optim.param_groups for p in group["params"])

        def send_others() -> None:
            before = weight.detach().clone()
            send()
            if not own:
                weight.data.copy_(before)

        zero._sync_params = send_others
        return zero

    def load(self) -> None:
        """Take optimizer and generator from a checkpoint: moments of the kind that 7 steps leave."""
        drawn = torch.Generator().manual_seed(self.options.seed + 1)
        saved = self.optimizer.state_dict()
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        for number, parameter in enumerate(parameters):
            first = 1e-3 * torch.randn(parameter.shape, generator=drawn)
            second = 1e-6 * (1 + torch.rand(parameter.shape, generator=drawn))
            saved["state"][number] = {"step": torch.tensor(7.0), "exp_avg": first, "exp_avg_sq": second}
        self.damage(saved["state"], [tuple(p.shape) for p in parameters])
        self.optimizer.load_state_dict(saved)
        torch.set_rng_state(torch.Generator().manual_seed(self.options.seed + 2 + RANK).get_state())

    def damage(self, state: dict[int, dict[str, Tensor]], shapes: list[tuple[int, ...]]) -> None:
        """Lose or confuse what was saved, where planted."""
        if self.plant == "moments-lost":
            for entry in state.values():
                entry["exp_avg"].zero_()
        if self.plant == "step-not-saved":
            for entry in state.values():
                entry["step"].zero_()
        if self.plant == "state-by-number":  # gate and up of a block come in another order
            gate = [n for n, shape in enumerate(shapes) if shape == (self.options.hidden, self.options.width)]
            one, other = gate[2 * self.options.at : 2 * self.options.at + 2]
            state[one], state[other] = state[other], state[one]

    def window(self, step: int) -> list[tuple[Tensor, Tensor]]:
        """Return this rank's microbatches of the step: its share of the global batch."""
        options = self.options
        epoch, place = divmod(step, STEPS_PER_EPOCH)
        shuffled = torch.Generator().manual_seed(0 if self.plant == "epoch-not-set" else epoch)
        order = torch.randperm(len(self.documents), generator=shuffled).tolist()
        rows = [self.documents[n] for n in order[place * options.rows : (place + 1) * options.rows]]
        self.total = sum(len(row) - 1 for row in rows)
        if self.plant == "truncated-shorter" and step >= options.since:
            rows = [row[: options.length * 2 // 3] for row in rows]
        same = self.plant == "sampler-forgotten" and step >= options.since
        mine = rows[(0 if same else RANK) :: WORLD]
        parts = [mine[number :: options.accumulate] for number in range(options.accumulate)]
        return [self.collate(part, step) for part in parts]

    def collate(self, rows: list[list[int]], step: int) -> tuple[Tensor, Tensor]:
        longest = max(map(len, rows)) - 1
        tokens = torch.full((len(rows), longest), PAD)
        targets = torch.full((len(rows), longest), PAD)
        for number, row in enumerate(rows):
            tokens[number, : len(row) - 1] = torch.tensor(row[:-1])
            targets[number, : len(row) - 1] = torch.tensor(row[1:])
        if self.plant == "labels-shifted-twice" and step >= self.options.since:
            targets = F.pad(targets[:, 1:], (0, 1), value=PAD)
        return tokens, targets

    def objective(self, tokens: Tensor, targets: Tensor) -> Tensor:
        logits = self.model(tokens).flatten(0, 1)
        ignored = -100 if self.plant == "padding-trained" else PAD
        if self.plant == "means-of-means":
            mean = F.cross_entropy(logits, targets.flatten(), ignore_index=ignored)
            return mean / self.options.accumulate
        loss = F.cross_entropy(logits, targets.flatten(), ignore_index=ignored, reduction="sum")
        factor = (1 if self.plant == "no-world-factor" else WORLD) / self.total
        if self.plant == "divided-again":
            factor /= self.options.accumulate
        if self.plant == "factor-in-half":
            factor = float(torch.tensor(factor).half())
        if self.plant == "label-smoothing-scale":
            factor *= 1.03
        return loss * factor

    def backward(self, step: int) -> None:
        window = self.window(step)
        for number, (tokens, targets) in enumerate(window):
            last = number == len(window) - 1
            with self.quiet(last):
                self.scaler.scale(self.objective(tokens, targets)).backward()
            if self.plant == "clipped-in-the-loop" and not last:
                self.clip(step)
            if self.plant == "zeroed-in-the-loop" and not last:
                self.optimizer.zero_grad()
            if self.plant == "scheduled-in-the-loop" and not last:
                self.scheduler.step()

    def quiet(self, last: bool) -> contextlib.AbstractContextManager[None]:
        """Reduce at the last microbatch only."""
        silent = last if self.plant == "silent-at-the-last" else not last
        if self.plant == "always-silent":
            silent = True
        if isinstance(self.model, FSDPModule):
            self.model.set_requires_gradient_sync(not silent)
        elif silent and WORLD > 1:
            return self.model.no_sync()
        return contextlib.nullcontext()

    def clip(self, step: int) -> None:
        options = self.options
        if options.no_clip or (self.plant == "clip-off" and step >= options.since):
            return
        kind = float("inf") if self.plant == "clip-by-largest" else 2.0
        if isinstance(self.model, FullyShardedDataParallel) and self.plant != "clip-own-shard":
            self.model.clip_grad_norm_(options.max_norm, kind)
        else:
            limit = options.max_norm * (2 if self.plant == "clip-twice-as-high" else 1)
            nn.utils.clip_grad_norm_(self.model.parameters(), limit, kind)

    def reduce_again(self) -> None:
        """Reduce gradients that the wrapper has reduced."""
        for parameter in self.model.parameters():
            dist.all_reduce(parameter.grad)

    def update(self, step: int) -> None:
        options, late = self.options, step >= self.options.since
        if self.plant == "clipped-before-unscaling":
            self.clip(step)
        if self.plant != "scale-left-in":
            self.scaler.unscale_(self.optimizer)
        if self.plant != "clipped-before-unscaling":
            self.clip(step)
        block = self.inner.blocks[options.at]
        if self.plant == "gradient-dropped" and late:
            block.mlp_norm.weight.grad = None
        before = block.mlp.down.weight.detach().clone()
        if self.plant == "scale-left-in":
            self.optimizer.step()
        elif not (self.plant == "rank-skips" and late and RANK == 1):
            self.scaler.step(self.optimizer)
            self.scaler.update()
        if self.plant == "written-to-a-copy" and late:
            with torch.no_grad():
                block.mlp.down.weight.copy_(before)
        self.scheduler.step()
        if not (self.plant == "never-zeroed" and late):
            self.optimizer.zero_grad()

    def train(self) -> None:
        for step in range(self.options.steps):
            self.backward(step)
            if self.plant == "reduced-again":
                self.reduce_again()
            self.update(step)
            if self.plant == "left-in-eval" and step + 1 == self.options.since:
                self.model.eval()  # to look at the held-out loss


def decays(name: str) -> bool:
    return not (name.endswith("bias") or "norm" in name)


def main() -> None:
    options = arguments()
    if WORLD > 1:
        dist.init_process_group("gloo")
    Trainer(options).train()
    if WORLD > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
