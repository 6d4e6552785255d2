"""Ordinary training programs, one for each way in which a recorder could disturb one.

    python invisibility_zoo.py FOLDER NAME...

Trains each program NAME for a few steps and writes SHA-256 digests of its losses, parameters, buffers,
optimizer state and generators to FOLDER/NAME.json. No import of ours.
"""

from __future__ import annotations

import hashlib
import json
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint

Program = Callable[[], Iterator[float]]
STEPS = 4

kept: list[nn.Module | Optimizer] = []
"""The models and optimizers of the program, to be hashed when it has ended."""


def model(module: nn.Module) -> nn.Module:
    kept.append(module)
    return module


def optimizer(chosen: Optimizer) -> Optimizer:
    kept.append(chosen)
    return chosen


def classes(rows: int) -> tuple[Tensor, Tensor]:
    """Return features [rows, 8] and classes [rows] of 4."""
    return torch.randn(rows, 8), torch.randint(0, 4, (rows,))


def inplace_and_batch_norm() -> Iterator[float]:
    layers = [nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(inplace=True), nn.MaxPool2d(2)]
    net = model(nn.Sequential(*layers, nn.Flatten(), nn.Dropout(0.2), nn.Linear(54, 4)))
    sgd = optimizer(torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, nesterov=True))
    for _ in range(STEPS):
        loss = F.cross_entropy(net(torch.randn(5, 3, 8, 8)), torch.randint(0, 4, (5,)))
        sgd.zero_grad()
        loss.backward()
        sgd.step()
        yield loss.item()


class Recomputed(nn.Module):
    """Blocks with dropout that are recomputed in backward."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.first = nn.Linear(8, 16)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Dropout(0.3)) for _ in range(2)
        )
        self.last = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return self.last(x)


def recomputed(reentrant: bool) -> Iterator[float]:
    net = model(Recomputed(reentrant))
    adam = optimizer(torch.optim.Adam(net.parameters(), lr=1e-2, amsgrad=True))
    for _ in range(STEPS):
        x, y = classes(6)
        loss = F.cross_entropy(net(x), y, label_smoothing=0.1)
        loss.backward()
        adam.step()
        adam.zero_grad()
        yield loss.item()


def recomputed_reentrant() -> Iterator[float]:
    return recomputed(reentrant=True)


def recomputed_non_reentrant() -> Iterator[float]:
    return recomputed(reentrant=False)


def closures() -> Iterator[float]:
    net = model(nn.Linear(8, 1))
    lbfgs = optimizer(torch.optim.LBFGS(net.parameters(), max_iter=4, line_search_fn="strong_wolfe"))
    x, y = torch.randn(16, 8), torch.randn(16, 1)

    def closure() -> Tensor:
        lbfgs.zero_grad()
        loss = F.mse_loss(net(x), y)
        loss.backward()
        return loss

    for _ in range(STEPS):
        yield lbfgs.step(closure).item()


def two_optimizers() -> Iterator[float]:
    maker, judge = model(nn.Linear(4, 8)), model(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1)))
    first = optimizer(torch.optim.AdamW(judge.parameters(), lr=1e-2))
    second = optimizer(torch.optim.RMSprop(maker.parameters(), lr=1e-2))
    for _ in range(STEPS):
        made = maker(torch.randn(6, 4))
        first.zero_grad()
        truth, fake = judge(torch.randn(6, 8)), judge(made.detach())
        loss = F.binary_cross_entropy_with_logits(truth, torch.ones(6, 1))
        loss = loss + F.binary_cross_entropy_with_logits(fake, torch.zeros(6, 1))
        loss.backward()
        first.step()
        second.zero_grad()
        F.binary_cross_entropy_with_logits(judge(made), torch.ones(6, 1)).backward()
        second.step()
        yield loss.item()


def optimizer_in_backward() -> Iterator[float]:
    net = model(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)))
    owners = {p: optimizer(torch.optim.SGD([p], lr=0.1, momentum=0.5)) for p in net.parameters()}

    def update(parameter: Tensor) -> None:
        owners[parameter].step()
        owners[parameter].zero_grad()

    for parameter in net.parameters():
        parameter.register_post_accumulate_grad_hook(update)
    for _ in range(STEPS):
        x, y = classes(6)
        loss = F.cross_entropy(net(x), y)
        loss.backward()
        yield loss.item()


def loss_scale_with_skipped_step() -> Iterator[float]:
    net = model(nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4)))
    adam = optimizer(torch.optim.AdamW(net.parameters(), lr=1e-2))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**22, growth_interval=2)
    for _ in range(STEPS + 2):
        x, y = classes(6)
        with torch.autocast("cpu", torch.float16):
            logits = net(x)
        loss = F.cross_entropy(logits.float(), y)
        scaler.scale(loss).backward()
        scaler.unscale_(adam)
        nn.utils.clip_grad_norm_(net.parameters(), 0.1)
        scaler.step(adam)
        scaler.update()
        adam.zero_grad()
        yield loss.item() + scaler.get_scale()


def handwritten_loss() -> Iterator[float]:
    net = model(nn.Linear(8, 4))
    for _ in range(STEPS):
        x, y = classes(6)
        picked = F.log_softmax(net(x), dim=-1).gather(1, y[:, None])
        loss = -picked.sum() / 6
        loss.backward()
        with torch.no_grad():
            for parameter in net.parameters():
                assert parameter.grad is not None
                parameter -= 0.1 * parameter.grad
                parameter.grad = None
        yield loss.item()


def sparse_embedding() -> Iterator[float]:
    table, head = model(nn.EmbeddingBag(20, 8, sparse=True)), model(nn.Linear(8, 4))
    sparse = optimizer(torch.optim.SparseAdam(list(table.parameters()), lr=1e-2))
    dense = optimizer(torch.optim.Adagrad(head.parameters(), lr=1e-2))
    for _ in range(STEPS):
        ids, y = torch.randint(0, 20, (6, 5)), torch.randint(0, 4, (6,))
        loss = F.nll_loss(F.log_softmax(head(table(ids)), dim=-1), y)
        loss.backward()
        sparse.step()
        dense.step()
        sparse.zero_grad()
        dense.zero_grad()
        yield loss.item()


def recurrent() -> Iterator[float]:
    net = model(nn.LSTM(8, 8, num_layers=2, dropout=0.2, batch_first=True))
    adam = optimizer(torch.optim.NAdam(net.parameters(), lr=1e-2))
    for _ in range(STEPS):
        out, (hidden, _) = net(torch.randn(3, 7, 8))
        loss = F.smooth_l1_loss(out[:, -1], torch.zeros(3, 8)) + hidden.square().mean()
        loss.backward()
        nn.utils.clip_grad_value_(net.parameters(), 0.01)
        adam.step()
        adam.zero_grad()
        yield loss.item()


def attention_fast_path() -> Iterator[float]:
    net = model(nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True))
    adam = optimizer(torch.optim.AdamW(net.parameters(), lr=1e-2))
    for _ in range(STEPS):
        x = torch.randn(3, 7, 8)
        loss = net(x).square().mean()
        loss.backward()
        adam.step()
        adam.zero_grad()
        net.eval()
        with torch.inference_mode():
            held_out = net(torch.randn(3, 7, 8)).square().mean().item()
        net.train()
        yield loss.item() + held_out


class Shared(nn.Module):
    """One layer called twice, one weight used in two modules, and an output that is written in place."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 8)
        self.twice = nn.Linear(8, 8)
        self.head = nn.Linear(8, 20, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> dict[str, Tensor]:
        x = self.twice(self.twice(self.embed(ids)))
        x += 1.0
        return {"logits": self.head(x), "hidden": x}


def shared_weights() -> Iterator[float]:
    net = model(Shared())
    sgd = optimizer(torch.optim.SGD(net.parameters(), lr=0.1, weight_decay=0.01))
    schedule = torch.optim.lr_scheduler.OneCycleLR(sgd, max_lr=0.2, total_steps=10)
    for _ in range(STEPS):
        ids = torch.randint(0, 20, (3, 6))
        out = net(ids)
        loss = F.cross_entropy(out["logits"].flatten(0, 1), ids.flatten()) + out["hidden"].abs().mean()
        loss.backward()
        sgd.step()
        schedule.step()
        sgd.zero_grad(set_to_none=False)
        yield loss.item()


def compiled() -> Iterator[float]:
    net = model(nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Dropout(0.1), nn.Linear(16, 4)))
    step = torch.compile(net, backend="aot_eager")
    adam = optimizer(torch.optim.Adam(net.parameters(), lr=1e-2))
    for _ in range(STEPS):
        x, y = classes(6)
        loss = F.cross_entropy(step(x), y)
        loss.backward()
        adam.step()
        adam.zero_grad()
        yield loss.item()


def loaded_by_workers() -> Iterator[float]:
    data = torch.utils.data.TensorDataset(torch.randn(16, 8), torch.randint(0, 4, (16,)))
    loader = torch.utils.data.DataLoader(data, batch_size=4, shuffle=True, num_workers=2)
    net = model(nn.Linear(8, 4))
    sgd = optimizer(torch.optim.SGD(net.parameters(), lr=0.1))
    for x, y in loader:
        loss = F.multi_margin_loss(net(x), y)
        loss.backward()
        sgd.step()
        sgd.zero_grad()
        yield loss.item()


PROGRAMS: dict[str, Program] = {
    program.__name__: program
    for program in (
        inplace_and_batch_norm, recomputed_reentrant, recomputed_non_reentrant, closures, two_optimizers,
        optimizer_in_backward, loss_scale_with_skipped_step, handwritten_loss, sparse_embedding, recurrent,
        attention_fast_path, shared_weights, compiled, loaded_by_workers,
    )
}  # fmt: skip


def tensors_in(value: object) -> Iterator[Tensor]:
    """Yield the tensors in nested containers, numbers among them as tensors, in order."""
    if isinstance(value, Tensor):
        yield value.to_dense() if value.is_sparse else value
    elif isinstance(value, bool | int | float):
        yield torch.tensor(float(value), dtype=torch.float64)
    elif isinstance(value, dict):
        for part in value.values():
            yield from tensors_in(part)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from tensors_in(part)


def digest(value: object) -> str:
    sha = hashlib.sha256()
    for tensor in tensors_in(value):
        sha.update(f"{tensor.dtype} {tuple(tensor.shape)} ".encode())
        sha.update(bytes(tensor.detach().contiguous().flatten().view(torch.uint8).tolist()))
    return sha.hexdigest()


def main() -> None:
    folder, *names = sys.argv[1:]
    for name in names:
        train(name, Path(folder) / f"{name}.json")


def train(name: str, path: Path) -> None:
    kept.clear()
    torch.manual_seed(0)
    random.seed(0)
    losses = torch.tensor(list(PROGRAMS[name]()), dtype=torch.float64)
    hashes = {"losses": digest(losses), "rng": digest(torch.get_rng_state())}
    hashes["python_rng"] = hashlib.sha256(repr(random.getstate()).encode()).hexdigest()
    for number, thing in enumerate(kept):
        hashes[f"{number}.{type(thing).__name__}"] = digest(thing.state_dict())
    path.write_text(json.dumps(hashes | {"loss": losses.tolist()}, indent=2) + "\n")


if __name__ == "__main__":
    main()
