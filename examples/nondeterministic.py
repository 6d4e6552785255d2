"""Train a classifier whose runs differ: threads add up gradients in the order in which they end.

    python examples/nondeterministic.py

Plain PyTorch. As with atomic additions on a GPU, the rows of an embedding's gradient are added in bfloat16 in
an order that nobody chose, so two runs of the same code with the same seed differ by far more than float32
rounds. ``--plant`` plants a mistake that is of about the size of this noise, or below it.
"""

import argparse
from concurrent.futures import ThreadPoolExecutor, as_completed

import torch
import torch.nn.functional as F
from torch import Tensor, nn

TOKENS, WIDTH, CLASSES, LENGTH, ROWS = 64, 24, 10, 16, 32
THREADS, CHUNKS = 4, 16

PLANTS = {
    "lost-chunk": "local_grad: the last chunk of rows is not added to the embedding's gradient",
    "scaled-head": "local_grad: the gradient of the head is half a percent too large",
    "stale-bias": "local_grad: the gradient of the hidden bias lacks one row",
}


class Gather(torch.autograd.Function):
    """Take rows of a table; backward adds up their gradients in threads."""

    pool = ThreadPoolExecutor(THREADS)
    chunks = CHUNKS

    @staticmethod
    def forward(ctx, table: Tensor, ids: Tensor) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.rows = table.shape[0]
        return table[ids]

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        (ids,) = ctx.saved_tensors
        parts = zip(ids.flatten().chunk(CHUNKS), gradient.flatten(0, 1).chunk(CHUNKS), strict=True)
        work = [Gather.pool.submit(_sum_rows, ctx.rows, *part) for part in parts][: Gather.chunks]
        total = torch.zeros(ctx.rows, gradient.shape[-1], dtype=torch.bfloat16)
        for done in as_completed(work):
            total += done.result()
        return total.to(gradient.dtype), None


def _sum_rows(rows: int, ids: Tensor, gradient: Tensor) -> Tensor:
    own = torch.zeros(rows, gradient.shape[-1], dtype=torch.bfloat16)
    return own.index_add_(0, ids, gradient.to(torch.bfloat16))


class Embedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(TOKENS, WIDTH))

    def forward(self, ids: Tensor) -> Tensor:
        return Gather.apply(self.weight, ids)


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = Embedding()
        self.hidden = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, ids: Tensor) -> Tensor:
        bag = self.embedding(ids).mean(1)
        return self.head(torch.tanh(self.hidden(bag)))


def plant(mistake: str, model: Classifier) -> None:
    """Make one of the mistakes of ``PLANTS``."""
    if mistake == "lost-chunk":
        Gather.chunks = CHUNKS - 1
    if mistake == "scaled-head":
        model.head.weight.register_hook(lambda gradient: 1.005 * gradient)
    if mistake == "stale-bias":
        model.hidden.bias.register_hook(lambda gradient: gradient * (1 - 1 / ROWS))


def train(steps: int, seed: int, mistake: str | None) -> float:
    """Train on sequences whose class is their most frequent token, modulo; return the last loss."""
    torch.manual_seed(seed)
    torch.set_num_threads(1)
    model = Classifier()
    if mistake:
        plant(mistake, model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(steps):
        ids = torch.randint(TOKENS, (ROWS, LENGTH))
        labels = ids.mode(1).values % CLASSES
        loss = F.cross_entropy(model(ids), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--plant", choices=sorted(PLANTS), help="a mistake to make")
    options = parser.parse_args()
    print(f"loss {train(options.steps, options.seed, options.plant):.9f}")


if __name__ == "__main__":
    main()
