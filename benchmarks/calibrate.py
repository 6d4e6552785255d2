"""Measure what correct computations need of the error model's constants, per kind of operation and dtype.

    python benchmarks/calibrate.py [--traces FOLDER…]

Each kernel computes one thing in two legal ways (blocks of another size, another order, fused and decomposed,
other ranks' partial sums) on inputs that are equal in every bit, over widths and lengths of several orders of
magnitude. Printed is the error over what ``diff.tolerance`` allows: median, 99 % and worst, for each of the
three tests, and the margin that is left. ``--traces`` takes folders ``a`` and ``b`` of recorded legal pairs
(FOLDER/a, FOLDER/b) and prints the same per kind of boundary. No mistake is ever looked at here.
"""

from __future__ import annotations

import argparse
import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from tensortrace.diff.coherence import measure_coherence
from tensortrace.diff.compare import EPS, measure
from tensortrace.diff.engine import compare
from tensortrace.diff.result import Judgement
from tensortrace.diff.tolerance import Measured, judge_model, measure_peak

DTYPES = ("float64", "float32", "float16", "bfloat16")
SEEDS = range(4)

Way = Callable[[], Tensor]
Case = tuple[Way, Way, int, float]
"""Two legal ways, the number of terms an element sums, and the norm of the terms where they may cancel."""


def normal(*shape: int, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    """Return random numbers; the generator is seeded per case."""
    return (scale * torch.randn(*shape, dtype=torch.float64)).to(dtype)


def matmul(dtype: torch.dtype) -> Iterator[Case]:
    """Products in one call, and in blocks of the summed dimension that are added in the accumulator."""
    wide = torch.promote_types(dtype, torch.float32)
    for width in (16, 128, 1024, 8192):
        x, w = normal(24, width, dtype=dtype), normal(width, 20, dtype=dtype)

        def blocks(x: Tensor = x, w: Tensor = w, size: int = max(width // 7, 1)) -> Tensor:
            parts = zip(x.split(size, 1), w.split(size, 0), strict=True)
            return sum((a.to(wide) @ b.to(wide) for a, b in parts), torch.zeros((), dtype=wide)).to(dtype)

        yield lambda x=x, w=w: x @ w, blocks, width, 0.0


def sums(dtype: torch.dtype) -> Iterator[Case]:
    """Sums of many terms: torch's, and one term after the other in the accumulator."""
    wide = torch.promote_types(dtype, torch.float32)
    for length in (64, 1024, 16384, 131072):
        x = normal(length, 8, dtype=dtype)
        terms = float(x.double().norm())
        in_turn = lambda x=x: torch.cumsum(x.to(wide), 0)[-1].to(dtype)  # noqa: E731
        yield lambda x=x: x.sum(0), in_turn, length, terms


def layer_norm(dtype: torch.dtype) -> Iterator[Case]:
    """Layer norm, fused and written out, of inputs of plain and of small variance."""
    wide = torch.promote_types(dtype, torch.float32)
    for width in (16, 256, 4096):
        x, g = normal(32, width, dtype=dtype), normal(width, dtype=dtype)

        def plain(x: Tensor = x, g: Tensor = g) -> Tensor:
            v = x.to(wide)
            v = v - v.mean(-1, keepdim=True)
            return (v / (v.square().mean(-1, keepdim=True) + 1e-5).sqrt() * g).to(dtype)

        yield lambda x=x, g=g: F.layer_norm(x, (x.shape[-1],), g), plain, width, 0.0


def softmax(dtype: torch.dtype) -> Iterator[Case]:
    """Softmax, fused and written out, from flat to saturated."""
    wide = torch.promote_types(dtype, torch.float32)
    for scale in (0.1, 1.0, 30.0):
        x = normal(32, 512, dtype=dtype, scale=scale)

        def plain(x: Tensor = x) -> Tensor:
            e = (x.to(wide) - x.to(wide).amax(-1, keepdim=True)).exp()
            return (e / e.sum(-1, keepdim=True)).to(dtype)

        yield lambda x=x: x.softmax(-1), plain, 512, 0.0


def attention(dtype: torch.dtype) -> Iterator[Case]:
    """Attention by torch's kernel and written out, with scores kept in the dtype."""
    for length in (16, 128, 512):
        q, k, v = (normal(1, 2, length, 32, dtype=dtype) for _ in range(3))

        def plain(q: Tensor = q, k: Tensor = k, v: Tensor = v) -> Tensor:
            scores = (q @ k.transpose(-1, -2)) / math.sqrt(32)
            return scores.softmax(-1) @ v

        yield lambda q=q, k=k, v=v: F.scaled_dot_product_attention(q, k, v), plain, length, 0.0


def convolution(dtype: torch.dtype) -> Iterator[Case]:
    """Convolution by torch and as a product of unfolded patches."""
    for channels in (3, 32):
        x, w = normal(2, channels, 12, 12, dtype=dtype), normal(8, channels, 3, 3, dtype=dtype)

        def plain(x: Tensor = x, w: Tensor = w) -> Tensor:
            return (w.flatten(1) @ F.unfold(x, 3)).reshape(2, 8, 10, 10)

        yield lambda x=x, w=w: F.conv2d(x, w), plain, 9 * channels, 0.0


def embedding_gradient(dtype: torch.dtype) -> Iterator[Case]:
    """Gradients of rows: added in two orders in the accumulator."""
    wide = torch.promote_types(dtype, torch.float32)
    for tokens in (256, 16384):
        ids, g = torch.randint(16, (tokens,)), normal(tokens, 32, dtype=dtype)

        def added(order: Tensor, ids: Tensor = ids, g: Tensor = g) -> Tensor:
            return torch.zeros(16, 32, dtype=wide).index_add_(0, ids[order], g[order].to(wide)).to(dtype)

        forth, back = torch.arange(tokens), torch.arange(tokens).flip(0)
        yield lambda a=added, o=forth: a(o), lambda a=added, o=back: a(o), tokens, float(g.double().norm())


def collective(dtype: torch.dtype) -> Iterator[Case]:
    """A mean over ranks in the dtype on the wire, in two orders."""
    for ranks in (2, 8, 64):
        parts = [normal(64, 64, dtype=dtype) for _ in range(ranks)]
        terms = float(torch.stack(parts).double().norm()) / ranks

        def mean(order: list[Tensor], ranks: int = ranks) -> Tensor:
            total = order[0]
            for part in order[1:]:
                total = total + part
            return total / ranks

        yield lambda p=parts, m=mean: m(p), lambda p=parts, m=mean: m(p[::-1]), ranks, terms


def weight_gradient(dtype: torch.dtype) -> Iterator[Case]:
    """A weight's gradient over all rows at once, and summed over microbatches in float32."""
    wide = torch.promote_types(dtype, torch.float32)
    for tokens in (64, 4096):
        x, g = normal(tokens, 48, dtype=dtype), normal(tokens, 40, dtype=dtype)

        def split(x: Tensor = x, g: Tensor = g) -> Tensor:
            parts = zip(g.chunk(4), x.chunk(4), strict=True)
            return sum(((b.T @ a).to(wide) for b, a in parts), torch.zeros((), dtype=wide))

        yield lambda x=x, g=g: (g.T @ x).to(wide), split, tokens, 0.0


KERNELS = (
    matmul, sums, layer_norm, softmax, attention, convolution, embedding_gradient, collective, weight_gradient
)  # fmt: skip


def judged(case: Case, eps: float) -> Judgement:
    """Judge the two ways against each other; both are in turn the reference."""
    one, other, length, terms = case
    a, b = (way().to(torch.float64).numpy() for way in (one, other))
    metrics = measure(a, b, eps=eps)
    if metrics.equal:
        return judge_model(Measured(metrics, 0.0, terms), eps, [])
    peak = measure_peak([(a, b)], metrics, terms)
    coherence = measure_coherence(a.shape, [(a, b)], metrics.projection, eps)
    return judge_model(Measured(metrics, peak, terms, length, coherence), eps, [])


def show(what: str, judgements: list[Judgement]) -> None:
    """Print one row of the table."""
    ratios = np.array([j.ratio for j in judgements])
    worst = judgements[int(ratios.argmax())]
    median, most, top = np.quantile(ratios, [0.5, 0.99, 1.0])
    margin = f"{1 / top:8.1f}" if top else "   equal"
    test = worst.reason.split(",")[0].rpartition(" ")[0]
    print(f"| {what:32} | {len(ratios):5} | {median:6.3f} | {most:6.3f} | {top:6.3f} | {margin} | {test} |")


def head() -> None:
    """Print the head of a table."""
    print("| what | pairs | median | 99 % | worst | margin | by the test |\n|---|---|---|---|---|---|---|")


def kernels() -> None:
    """Print the table of kernels."""
    head()
    for kernel in KERNELS:
        for name in DTYPES:
            found = []
            for seed in SEEDS:
                torch.manual_seed(seed)
                found += [judged(case, EPS[name]) for case in kernel(getattr(torch, name))]
            show(f"{kernel.__name__} {name}", found)


def traces(folders: list[Path]) -> None:
    """Print the table of boundaries of recorded legal pairs."""
    found: dict[str, list[Judgement]] = defaultdict(list)
    for folder in folders:
        result = compare(folder / "a", folder / "b")
        print(f"{folder.name}: {result.headline}")
        for boundary in result.boundaries:
            if boundary.judgement.policy == "error-model":
                found[boundary.where.kind].append(boundary.judgement)
    head()
    for kind, judgements in found.items():
        show(kind, judgements)


def main() -> None:
    """Print what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--traces", type=Path, nargs="+", default=[])
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.traces:
        traces(options.traces)
    else:
        kernels()


if __name__ == "__main__":
    main()
