"""Train a small GPT on the sources of Python's standard library, on one rank or on many.

    python examples/train_gpt.py
    torchrun --nproc-per-node 2 examples/train_gpt.py --accumulate 2

Plain PyTorch. Whatever the number of ranks and of microbatches, a step sees the same documents and the
same objective: the mean loss over all valid tokens of the step. ``--plant`` plants a mistake of the kind
that real training code has had; without it the program is correct.
"""

import argparse
import contextlib
import gc
import hashlib
import json
import math
import os
import random
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

PAD = 256  # the tokens are bytes, and one for padding
VOCABULARY = 257
IGNORE = -100
SOURCES = ("abc", "argparse", "bisect", "calendar", "copy", "csv", "functools", "heapq", "textwrap", "trace")
HELD_OUT = 16
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
BETAS = (0.9, 0.95)
WEIGHT_DECAY = 0.1

PLANTS = {
    "local-means": "loss: each microbatch divides by its own token count; the means are averaged",
    "loss-scale-4pct": "loss: the objective is 4 % too large",
    "missing-world-factor": "loss: not multiplied by the number of ranks, over which DDP then averages",
    "padding-counted": "loss: the count of tokens includes padding",
    "wrong-element": "activation: one element of the last block's MLP output is off by 1e-4 of itself",
    "lost-momentum": "init: the first moments are not restored from the checkpoint (--resume)",
    "swapped-block": "init: the query and key rows of the first block's attention weight are swapped",
    "same-documents": "input: every rank reads the documents of rank 0",
    "no-zero-grad": "local_grad: gradients are never zeroed",
    "zero-grad-per-microbatch": "reduced_grad: gradients are zeroed between microbatches (--accumulate)",
    "double-reduction": "reduced_grad: gradients that DDP has averaged are summed over ranks once more",
    "clip-per-microbatch": "clipped_grad: clips before the accumulation ends (--accumulate)",
    "clip-before-unscale": "clipped_grad: clips gradients that still carry the loss scale (--dtype fp16)",
    "no-clip": "clipped_grad: never clips",
    "scheduler-per-microbatch": "schedule: the scheduler steps once a microbatch (--accumulate)",
    "decay-mixup": "schedule: weight decay acts on the norms' scales, which belong to the no-decay group",
    "forgotten-parameter": "schedule: the position embedding is not given to the optimizer",
}


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        heads = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = heads.permute(2, 0, 3, 1, 4).unbind(0)
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, width))


class MLP(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.act = nn.GELU()
        self.down = nn.Linear(4 * width, width)
        self.wrong_element = False

    def forward(self, x: Tensor) -> Tensor:
        y = self.down(self.act(self.up(x)))
        if self.wrong_element:
            y = y.clone()
            y[0, 0, y[0, 0].abs().argmax()] *= 1.0001
        return y


class Block(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = Attention(width, heads, dropout)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = MLP(width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.attention_norm(x)))
        return x + self.dropout(self.mlp(self.mlp_norm(x)))


class GPT(nn.Module):
    def __init__(self, width: int, depth: int, heads: int, length: int, dropout: float) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, width)
        self.position = nn.Embedding(length, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.token.weight
        self.apply(self._initialise)

    @staticmethod
    def _initialise(module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.dropout(self.token(tokens) + self.position(positions))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


@dataclass
class Batch:
    """One microbatch: tokens and next tokens, both [documents, longest document]."""

    tokens: Tensor
    targets: Tensor


def read_documents(length: int) -> list[bytes]:
    """Return the sources' lines, each of at most ``length`` + 1 bytes.

    They are in the order of their hashes, so that another version of Python changes few of them.
    """
    folder = Path(sysconfig.get_paths()["stdlib"])
    texts = [(folder / f"{name}.py").read_bytes() for name in SOURCES]
    lines = {line.strip()[: length + 1] for text in texts for line in text.splitlines()}
    return sorted((line for line in lines if len(line) > 8), key=lambda line: hashlib.sha256(line).digest())


def collate(documents: list[bytes], device: str) -> Batch:
    """Pad to the longest of these documents, so that the width depends on who shares the microbatch."""
    longest = max(len(document) for document in documents) - 1
    tokens = torch.full((len(documents), longest), PAD)
    targets = torch.full((len(documents), longest), IGNORE)
    for row, document in enumerate(documents):
        values = torch.tensor(list(document))
        tokens[row, : len(document) - 1] = values[:-1]
        targets[row, : len(document) - 1] = values[1:]
    return Batch(tokens.to(device), targets.to(device))


def optimizer_groups(model: nn.Module, plant: str | None) -> list[dict]:
    """Put matrices in the group with weight decay, biases and norms in the one without."""
    decay, no_decay = [], []
    for name, parameter in model.named_parameters():
        if plant == "forgotten-parameter" and name.endswith("position.weight"):
            continue
        decays = not name.endswith("bias") if plant == "decay-mixup" else parameter.dim() >= 2
        (decay if decays else no_decay).append(parameter)
    return [{"params": decay, "weight_decay": WEIGHT_DECAY}, {"params": no_decay, "weight_decay": 0.0}]


class Trainer:
    """The state of a run and its steps."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.rank = int(os.environ.get("RANK", 0))
        self.world = int(os.environ.get("WORLD_SIZE", 1))
        self.documents = read_documents(args.length)
        torch.manual_seed(args.seed)
        module = GPT(args.width, args.depth, args.heads, args.length, args.dropout).to(args.device)
        self.plant_in(module)
        self.model = DistributedDataParallel(module) if self.world > 1 else module
        self.optimizer = torch.optim.AdamW(
            optimizer_groups(self.model, args.plant), lr=args.lr, betas=BETAS, **args.implementation
        )
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, self.learning_rate_factor)
        self.scaler = torch.amp.GradScaler(
            args.device, init_scale=args.loss_scale, enabled=args.dtype == "fp16"
        )
        self.step = 0
        self.losses: list[float] = []
        torch.manual_seed(args.seed + 1 + self.rank)  # dropout differs between ranks
        random.seed(args.seed + 1 + self.rank)

    def plant_in(self, module: GPT) -> None:
        if self.args.plant == "wrong-element":
            module.blocks[-1].mlp.wrong_element = True
        if self.args.plant == "swapped-block":
            query, key, _ = module.blocks[0].attention.qkv.weight.data.chunk(3)
            swapped = torch.cat([key, query])
            query.copy_(swapped[: len(query)])
            key.copy_(swapped[len(query) :])

    def learning_rate_factor(self, step: int) -> float:
        """Warm up linearly, then fall along a cosine to a tenth."""
        if step < self.args.warmup:
            return (step + 1) / self.args.warmup
        progress = (step - self.args.warmup) / max(1, self.args.schedule - self.args.warmup)
        return 0.1 + 0.45 * (1 + math.cos(math.pi * min(1.0, progress)))

    def window(self) -> list[Batch]:
        """Return this rank's microbatches of the step: its share of the global batch, in equal parts."""
        first = self.step * self.args.batch
        training = self.documents[:-HELD_OUT]
        indices = [(first + i) % len(training) for i in range(self.args.batch)]
        rank = 0 if self.args.plant == "same-documents" else self.rank
        mine = [training[i] for i in indices[rank :: self.world]]
        parts = [mine[m :: self.args.accumulate] for m in range(self.args.accumulate)]
        return [collate(part, self.args.device) for part in parts]

    def all_reduce(self, value: Tensor) -> Tensor:
        if self.world > 1:
            dist.all_reduce(value)
        return value

    def count_tokens(self, window: list[Batch]) -> float:
        """Count the valid tokens of the window on all ranks."""
        padding = self.args.plant == "padding-counted"
        counts = [b.targets.numel() if padding else (b.targets != IGNORE).sum().item() for b in window]
        return self.all_reduce(torch.tensor(float(sum(counts)), device=self.args.device)).item()

    def loss(self, batch: Batch, reduction: str = "sum") -> Tensor:
        dtype = DTYPES[self.args.dtype]
        with torch.autocast(self.args.device, dtype, enabled=dtype != torch.float32):
            logits = self.model(batch.tokens)
        flat, targets = logits.float().flatten(0, 1), batch.targets.flatten()
        return F.cross_entropy(flat, targets, ignore_index=IGNORE, reduction=reduction)

    def backward(self, batch: Batch, total: float) -> Tensor:
        """Run one microbatch and return its loss sum.

        DDP averages over ranks, hence the factor ``world``. The accumulated sum is divided by the number
        of microbatches here, or in ``update`` with ``--average gradient``, hence the factor ``accumulate``.
        """
        args = self.args
        if args.plant == "local-means":
            mean = self.loss(batch, "mean")
            loss, objective = mean.detach() * (batch.targets != IGNORE).sum(), mean
        else:
            world = 1 if args.plant == "missing-world-factor" else self.world
            loss = self.loss(batch)
            objective = loss * (world * args.accumulate / total)
        if args.plant == "loss-scale-4pct":
            objective = objective * 1.04
        if args.average == "loss":
            objective = objective / args.accumulate
        self.scaler.scale(objective).backward()
        return loss.detach()

    def clip(self) -> float:
        if self.args.plant == "no-clip":
            return math.nan
        return float(nn.utils.clip_grad_norm_(self.model.parameters(), self.args.clip))

    def train_step(self) -> None:
        args = self.args
        window = self.window()
        total = self.count_tokens(window)
        loss = torch.zeros((), device=args.device)
        for index, batch in enumerate(window):
            last = index == len(window) - 1
            local = self.world > 1 and not last and not args.sync_every
            with self.model.no_sync() if local else contextlib.nullcontext():
                loss += self.backward(batch, total)
            if args.plant == "clip-per-microbatch" and not last:
                self.clip()
            if args.plant == "zero-grad-per-microbatch" and not last:
                self.optimizer.zero_grad()
            if args.plant == "scheduler-per-microbatch" and not last:
                self.scheduler.step()
        norm = self.update()
        self.losses.append(self.all_reduce(loss).item() / total)
        rate = self.scheduler.get_last_lr()[0]
        self.say(f"step {self.step}  loss {self.losses[-1]:.4f}  norm {norm:.4f}  next lr {rate:.2e}")
        self.step += 1

    def update(self) -> float:
        """Turn the accumulated gradients into a step; return their norm."""
        args = self.args
        if args.average == "gradient":
            for parameter in self.model.parameters():
                parameter.grad.div_(args.accumulate)
        if args.plant == "double-reduction":
            for parameter in self.model.parameters():
                self.all_reduce(parameter.grad)
        if args.plant == "clip-before-unscale":
            norm = self.clip()
            self.scaler.unscale_(self.optimizer)
        else:
            self.scaler.unscale_(self.optimizer)
            norm = self.clip()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.scheduler.step()
        if args.plant != "no-zero-grad":
            self.optimizer.zero_grad()
        return norm

    @torch.no_grad()
    def evaluate(self) -> None:
        self.model.eval()
        batch = collate(self.documents[-HELD_OUT:][self.rank :: self.world], self.args.device)
        count = (batch.targets != IGNORE).sum()
        total = self.all_reduce(torch.stack([self.loss(batch).double(), count.double()]))
        self.model.train()
        self.say(f"step {self.step}  held-out loss {total[0] / total[1]:.4f}")

    def save(self, path: str) -> None:
        states = [torch.get_rng_state()] * self.world
        if self.world > 1:
            dist.all_gather_object(states, torch.get_rng_state())
        if self.rank == 0:
            parts = {name: getattr(self, name).state_dict() for name in ("optimizer", "scheduler", "scaler")}
            model = self.model.module if self.world > 1 else self.model
            torch.save({"model": model.state_dict(), "step": self.step, "rng": states, **parts}, path)

    def resume(self, path: str) -> None:
        saved = torch.load(path, map_location=self.args.device, weights_only=True)
        model = self.model.module if self.world > 1 else self.model
        model.load_state_dict(saved["model"])
        for name in ("optimizer", "scheduler", "scaler"):
            getattr(self, name).load_state_dict(saved[name])
        if self.args.plant == "lost-momentum":
            for state in self.optimizer.state.values():
                state["exp_avg"].zero_()
        self.step = saved["step"]
        if len(saved["rng"]) == self.world:
            torch.set_rng_state(saved["rng"][self.rank].cpu())

    def say(self, text: str) -> None:
        if self.rank == 0:
            print(text, flush=True)


def digest(*tensors: Tensor) -> str:
    """Hash the bytes, dtypes and shapes of tensors."""
    sha = hashlib.sha256()
    for tensor in tensors:
        sha.update(f"{tensor.dtype} {tuple(tensor.shape)} ".encode())
        sha.update(bytes(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).tolist()))
    return sha.hexdigest()


def write_hashes(trainer: Trainer, path: str) -> None:
    """Write the SHA-256 of everything that a second, equal run must reproduce; one file per rank."""
    states = trainer.optimizer.state_dict()["state"]
    moments = [torch.as_tensor(value) for key in sorted(states) for value in states[key].values()]
    hashes = {
        "losses": digest(torch.tensor(trainer.losses, dtype=torch.float64)),
        "parameters": digest(*trainer.model.state_dict().values()),
        "optimizer": digest(*moments),
        "rng": digest(torch.get_rng_state()),
        "python_rng": hashlib.sha256(repr(random.getstate()).encode()).hexdigest(),
    }
    if trainer.args.device == "cuda":
        hashes["cuda_rng"] = digest(torch.cuda.get_rng_state())
    Path(f"{path}.rank{trainer.rank}").write_text(json.dumps(hashes, indent=2) + "\n")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train a small GPT on the sources of Python's standard library.",
        epilog="plants:\n" + "\n".join(f"  {name:26}{text}" for name, text in PLANTS.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--steps", type=int, default=5)
    add("--batch", type=int, default=8, help="documents of a step, over all ranks and microbatches")
    add("--accumulate", type=int, default=1, help="microbatches of a step on each rank")
    add("--sync-every", action="store_true", help="reduce after each microbatch, not only the last (DDP)")
    add("--average", choices=["loss", "gradient"], default="loss", help="what --accumulate divides")
    add("--length", type=int, default=64, help="most tokens of a document")
    add("--width", type=int, default=64)
    add("--depth", type=int, default=2)
    add("--heads", type=int, default=4)
    add("--dropout", type=float, default=0.0)
    add("--dtype", choices=list(DTYPES), default="fp32", help="of autocast; fp16 scales the loss")
    add("--loss-scale", type=float, default=65536.0, help="first scale of fp16's GradScaler")
    add("--lr", type=float, default=1e-3)
    add("--warmup", type=int, default=2, help="steps of warm-up")
    add("--schedule", type=int, default=100, help="step at which the cosine ends")
    add("--clip", type=float, default=0.25, help="greatest norm of the gradient")
    kinds = parser.add_mutually_exclusive_group()
    for kind in ("foreach", "fused", "single"):
        chosen = {"foreach": False} if kind == "single" else {kind: True}
        help_text = f"AdamW's {kind} implementation"
        kinds.add_argument(
            f"--{kind}", dest="implementation", action="store_const", const=chosen, default={}, help=help_text
        )
    add("--seed", type=int, default=0)
    add("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    add("--eval-every", type=int, metavar="N", help="also measure the held-out loss after every N steps")
    add("--save", metavar="FILE", help="write a checkpoint at the end")
    add("--resume", metavar="FILE", help="go on from a checkpoint, for --steps more steps")
    add("--hash-out", metavar="FILE", help="write SHA-256 of losses and final state to FILE.rankN")
    add("--plant", choices=list(PLANTS), metavar="NAME", help="plant a mistake, see below")
    args = parser.parse_args()
    if args.batch < int(os.environ.get("WORLD_SIZE", 1)) * args.accumulate:
        parser.error("--batch must give every microbatch of every rank a document")
    return args


def train(args: argparse.Namespace) -> None:
    trainer = Trainer(args)
    if args.resume:
        trainer.resume(args.resume)
    for _ in range(args.steps):
        trainer.train_step()
        if args.eval_every and trainer.step % args.eval_every == 0:
            trainer.evaluate()
    if args.save:
        trainer.save(args.save)
    if args.hash_out:
        write_hashes(trainer, args.hash_out)


def main() -> None:
    args = arguments()
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        if args.device == "cuda":
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl" if args.device == "cuda" else "gloo")
    train(args)
    if dist.is_initialized():
        gc.collect()  # a DDP module that outlives its gloo group aborts some processes at exit
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
