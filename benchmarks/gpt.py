"""The program whose recording is timed: a GPT of 4 layers, trained with AdamW, under one way of tracing it.

    python benchmarks/gpt.py WAY OUTPUT [--steps 8] [--autocast]
    torchrun --standalone --nproc-per-node 2 benchmarks/gpt.py WAY OUTPUT …

Width 256, 128 positions, 8 rows, float32: about 0.4 CPU-seconds and 400 MB of boundaries a step (230 MB of
them different). Prints one JSON object: what each step took, what all took until everything was written, and
the most memory that was held. ``WAYS`` below are the ways. Under torchrun the ranks share the rows out
(DistributedDataParallel on gloo).
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import resource
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY, WIDTH, HEADS, LAYERS, POSITIONS, ROWS = 512, 256, 4, 4, 128, 8
WARM_UP = 3
NEVER = "1000000"


class Block(nn.Module):
    """Attention and a two-layer perceptron, each normalised before and added."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.act, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Map [rows, positions, width] to the same shape."""
        rows, positions, _ = x.shape
        parts = self.qkv(self.norm1(x)).view(rows, positions, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(*parts, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(rows, positions, WIDTH))
        return x + self.down(self.act(self.up(self.norm2(x))))


class GPT(nn.Module):
    """Tokens to the scores of the next ones."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(POSITIONS, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map [rows, positions] to [rows, positions, vocabulary]."""
        x = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1]))
        return self.head(self.norm(self.blocks(x)))


class Program:
    """The model, its optimizer and its data; ``step`` trains once."""

    def __init__(self, *, autocast: bool) -> None:
        torch.manual_seed(0)
        self.model: nn.Module = GPT()
        self._rank, self._ranks = 0, 1
        if "RANK" in os.environ:
            dist.init_process_group("gloo")
            self._rank, self._ranks = dist.get_rank(), dist.get_world_size()
            self.model = nn.parallel.DistributedDataParallel(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self._autocast = autocast

    def step(self) -> None:
        """Run forward, backward, clipping and the update."""
        tokens = torch.randint(VOCABULARY, (ROWS, POSITIONS + 1))[self._rank :: self._ranks]
        self.optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=self._autocast):
            scores = self.model(tokens[:, :-1])
            loss = F.cross_entropy(scores.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()


Way = Callable[[Program, Path], contextlib.AbstractContextManager[Callable[[], None]]]
"""Enters one way of tracing; what it yields is called after each step."""


@contextlib.contextmanager
def plain(program: Program, output: Path) -> Iterator[Callable[[], None]]:
    """Trace nothing."""
    yield lambda: None


def recorded(**options: Any) -> Way:
    """Record with these options of ``trace record``."""

    @contextlib.contextmanager
    def way(program: Program, output: Path) -> Iterator[Callable[[], None]]:
        from tensortrace.tracer import record

        with record(output, **options):
            yield lambda: None

    return way


@contextlib.contextmanager
def copied_only(program: Program, output: Path) -> Iterator[Callable[[], None]]:
    """Record, but let the writer thread throw everything away: what is left is the training's own share."""
    from tensortrace.tracer.writer import RankWriter

    RankWriter.append = RankWriter.append_known = lambda self, *given, **named: None  # type: ignore
    with recorded()(program, output) as after:
        yield after


def by_hand(save: Callable[[dict[str, Tensor], Path], object]) -> Way:
    """Hook every module by hand and save each step's tensors in one file, as people do."""

    @contextlib.contextmanager
    def way(program: Program, output: Path) -> Iterator[Callable[[], None]]:
        held: dict[str, Tensor] = {}
        output.mkdir()
        handles = [
            hook
            for name, module in program.model.named_modules()
            for hook in (
                module.register_forward_hook(_keep(held, f"{name}.forward")),
                module.register_full_backward_hook(_keep(held, f"{name}.backward")),
            )
        ]
        files = iter(range(1 << 30))

        def after() -> None:
            for name, parameter in program.model.named_parameters():
                held[f"{name}.value"] = parameter.detach().clone()
                if parameter.grad is not None:
                    held[f"{name}.grad"] = parameter.grad.clone()
                for key, value in program.optimizer.state[parameter].items():
                    held[f"{name}.{key}"] = value.clone()
            save(held, output / str(next(files)))
            held.clear()

        yield after
        for handle in handles:
            handle.remove()

    return way


def _keep(held: dict[str, Tensor], name: str) -> Callable[..., None]:
    def hook(module: nn.Module, given: object, returned: object) -> None:
        for side, tensors in (("in", given), ("out", returned)):
            for number, tensor in enumerate(tensors if isinstance(tensors, tuple) else (tensors,)):
                if isinstance(tensor, Tensor):
                    held[f"{name}.{side}.{number}"] = tensor.detach().clone()

    return hook


def _save_torch(tensors: dict[str, Tensor], path: Path) -> None:
    torch.save(tensors, path)


def _save_safetensors(tensors: dict[str, Tensor], path: Path) -> None:
    from safetensors.torch import save_file

    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)


WAYS: dict[str, Way] = {
    "plain": plain,
    "unselected": recorded(steps=NEVER),
    "full": recorded(),
    "full-planes": recorded(compress="planes"),
    "full-none": recorded(compress="none"),
    "copied-only": copied_only,
    "dedup": recorded(dedup_replicas=True),
    "dedup-planes": recorded(dedup_replicas=True, compress="planes"),
    "dedup-none": recorded(dedup_replicas=True, compress="none"),
    "torch.save": by_hand(_save_torch),
    "safetensors": by_hand(_save_safetensors),
    "sketch": recorded(level=["sketch"]),
    "stats": recorded(level=["stats"]),
}


class Took:
    """Seconds since this was made: of the clock, of all threads' CPU time and of this thread's."""

    def __init__(self) -> None:
        self._began = self._now()

    def __call__(self) -> list[float]:
        """Return wall, user and system, and this thread's seconds."""
        return [now - began for now, began in zip(self._now(), self._began, strict=True)]

    @staticmethod
    def _now() -> tuple[float, float, float]:
        return time.perf_counter(), time.process_time(), time.thread_time()


def _settle() -> None:
    """Wait until what was recorded so far is written."""
    for stage in [found for found in gc.get_objects() if type(found).__name__ == "Stage"]:
        while getattr(stage, "_queue", None):
            time.sleep(0.05)
    time.sleep(0.1)


def main() -> None:
    """Train under one way and print what it took."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("way", choices=WAYS)
    parser.add_argument("output", type=Path)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--warm-up", type=int, default=WARM_UP)
    parser.add_argument("--autocast", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(2)
    program = Program(autocast=args.autocast)
    program.step()
    steps: list[list[float]] = []
    with WAYS[args.way](program, args.output) as after:
        for _ in range(args.warm_up):
            program.step()
            after()
        _settle()
        held = _peak_kib()
        all_took = Took()
        for _ in range(args.steps):
            took = Took()
            program.step()
            after()
            steps.append(took())
    result = {"steps": steps, "all": all_took(), "peak_kib": _peak_kib(), "peak_before_kib": held}
    json.dump(result, sys.stdout)
    if dist.is_initialized():
        dist.destroy_process_group()


def _peak_kib() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


if __name__ == "__main__":
    main()
