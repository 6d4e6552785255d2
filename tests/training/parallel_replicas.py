"""Layouts whose ranks read rows of their own: DDP, FSDP1, FSDP2, HSDP, ZeroRedundancyOptimizer."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import torch
import torch.distributed as dist
from parallel_model import Decoder
from parallel_parts import Layout
from parallel_rows import Batch
from parallel_settings import BETAS
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel


class DataParallel(Layout):
    """Every rank reads its own rows; the wrapper averages gradients, hence the factor."""

    def wrap(self, model: Decoder) -> None:
        self.part, self.parts, self.factor = self.rank, self.world, self.world
        self.wrap_data(model)

    def wrap_data(self, model: Decoder) -> None:
        """Wrap the model."""


class DDP(DataParallel):
    def wrap_data(self, model: Decoder) -> None:
        self.model = DistributedDataParallel(model)
        if self.plant == "reduced-in-fp16":
            self.model.register_comm_hook(None, fp16_compress_hook)

    def backward(self, batch: Batch, total: int) -> Tensor:
        quiet = self.plant == "no-sync-left-on"
        with self.model.no_sync() if quiet else contextlib.nullcontext():
            return super().backward(batch, total)


class ZeRO(DDP):
    """DDP with the optimizer's state spread over the ranks."""

    def optimizer(self, rate: float) -> torch.optim.Optimizer:
        settings = {"lr": rate, "betas": BETAS, "weight_decay": 0.1}
        zero = ZeroRedundancyOptimizer(self.parameters(), torch.optim.AdamW, **settings)
        if self.plant == "not-broadcast":
            sync = zero._sync_params
            zero._sync_params = lambda: self.sync_all_but_one(zero, sync)
        return zero

    def sync_all_but_one(self, zero: ZeroRedundancyOptimizer, sync: Callable[[], None]) -> None:
        """Broadcast what each rank has updated, except the embedding."""
        weight = self.whole.token.weight
        own = any(p is weight for group in zero.optim.param_groups for p in group["params"])
        before = weight.detach().clone()
        sync()
        if not own:
            with torch.no_grad():
                weight.copy_(before)


class FSDP1(DataParallel):
    """Flat parameters; a unit for each block and one for the rest."""

    use_orig_params = True

    def wrap_data(self, model: Decoder) -> None:
        kept = {"device_id": torch.device("cpu"), "use_orig_params": self.use_orig_params}
        kept |= self.settings.of_fsdp1()
        ignored = [model.norm] if self.plant == "norm-ignored" else None
        for name, layer in model.layers.items():
            model.layers[name] = FullyShardedDataParallel(layer, **kept)
        self.model = FullyShardedDataParallel(model, ignored_modules=ignored, **kept)

    def clip(self, max_norm: float) -> None:
        self.model.clip_grad_norm_(max_norm)

    def weights(self) -> dict[str, Tensor]:
        with FullyShardedDataParallel.summon_full_params(self.model, writeback=False):
            return super().weights()


class FSDP1Flat(FSDP1):
    use_orig_params = False


class FSDP2(DataParallel):
    def wrap_data(self, model: Decoder) -> None:
        self.shard(model, init_device_mesh("cpu", (self.world,), mesh_dim_names=("fsdp",)))

    def shard(self, model: Decoder, mesh: dist.DeviceMesh) -> None:
        for layer in model.layers.values():
            fully_shard(layer, mesh=mesh, **self.settings.of_fully_shard())
        fully_shard(model, mesh=mesh, **self.settings.of_fully_shard(whole=True))
        if self.plant == "sum-for-mean":
            for module in sharded(model):
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)

    def backward(self, batch: Batch, total: int) -> Tensor:
        if self.options.microbatches == 1:
            return super().backward(batch, total)
        done = torch.zeros(())
        chunks = batch.chunks(self.options.microbatches)
        for number, part in enumerate(chunks):
            self.model.set_requires_gradient_sync(number == len(chunks) - 1)
            with self.settings.forward():
                loss = self.loss(self.model(part.tokens), part.targets)
            self.settings.scaler.scale(loss * (self.factor / total)).backward()
            done = done + loss.detach()
        return done


class HSDP(FSDP2):
    """Shards over pairs of ranks, replicas over the pairs; on two ranks each is a replica."""

    def wrap_data(self, model: Decoder) -> None:
        replicas = 2
        names = ("replicate", "shard")
        mesh = init_device_mesh("cpu", (replicas, self.world // replicas), mesh_dim_names=names)
        self.shard(model, mesh["shard"] if self.plant == "replicas-forgotten" else mesh)


def sharded(model: nn.Module) -> list[FSDPModule]:
    return [module for module in model.modules() if isinstance(module, FSDPModule)]
