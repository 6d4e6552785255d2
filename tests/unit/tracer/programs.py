"""Small training programs of many kinds; each returns every tensor that a recording must not change."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

Tensors = list[torch.Tensor]
PROGRAMS: dict[str, Callable[[], Tensors]] = {}


def program(run: Callable[[], Tensors]) -> Callable[[], Tensors]:
    PROGRAMS[run.__name__] = run
    return run


def outcome(losses: Tensors, *things: nn.Module | torch.optim.Optimizer) -> Tensors:
    """Return losses, parameters, buffers, optimizer state and the generator's state."""
    found = [loss.detach() for loss in losses]
    for thing in things:
        if isinstance(thing, nn.Module):
            found += [tensor.detach() for tensor in thing.state_dict().values()]
        else:
            found += [
                value
                for state in thing.state.values()
                for value in state.values()
                if isinstance(value, torch.Tensor)
            ]
    return [tensor.clone() for tensor in found] + [torch.get_rng_state()]


class Conv(nn.Module):
    """In-place activation on a layer's output, batch norm, dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv1d(2, 4, 3), nn.BatchNorm1d(4), nn.ReLU(inplace=True), nn.Dropout(0.3), nn.Flatten()
        )
        self.head = nn.Linear(4 * 4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(x))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, *, steps: int = 3) -> Tensors:
    losses = []
    for _ in range(steps):
        loss = F.cross_entropy(model(torch.randn(4, 2, 6)), torch.tensor([0, 1, 2, -100]))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss)
    return outcome(losses, model, optimizer)


@program
def adamw_foreach() -> Tensors:
    model = Conv()
    return train(model, torch.optim.AdamW(model.parameters(), foreach=True))


@program
def adamw_fused() -> Tensors:
    model = Conv()
    return train(model, torch.optim.AdamW(model.parameters(), fused=True))


@program
def adamw_single() -> Tensors:
    model = Conv()
    return train(model, torch.optim.AdamW(model.parameters(), foreach=False))


@program
def tensor_hooks() -> Tensors:
    """Hooks that replace a gradient, change it in place, or only look."""
    model = Conv()
    first = model.layers[0]
    first.weight.register_hook(lambda gradient: gradient * 0.5)
    first.weight.register_hook(lambda gradient: gradient.clamp(-0.1, 0.1))
    first.bias.register_hook(lambda gradient: gradient.mul_(2.0))
    model.head.weight.register_hook(lambda gradient: None)
    return train(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))


@program
def sgd_momentum() -> Tensors:
    model = Conv()
    return train(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True))


@dataclasses.dataclass
class Output:
    logits: torch.Tensor
    extra: dict[str, torch.Tensor]


class Tied(nn.Module):
    """Tied embeddings, a module called twice, keyword-only inputs, containers in and out."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.block = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4), nn.GELU())
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight
        self.frozen = nn.Linear(4, 4).requires_grad_(False)

    def forward(self, *, batch: dict[str, torch.Tensor]) -> Output:
        x = self.embed(batch["ids"])
        x = self.block(self.block(x)) * batch["mask"].unsqueeze(-1)
        with torch.no_grad():
            scale = self.frozen(x).abs().mean()
        return Output(self.head(x / (1 + scale)), {"hidden": x})


@program
def tied_embeddings() -> Tensors:
    model = Tied()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    losses = []
    for _ in range(2):
        for _ in range(2):
            batch = {"ids": torch.randint(0, 7, (2, 5)), "mask": torch.ones(2, 5)}
            output = model(batch=batch)
            loss = F.cross_entropy(output.logits.flatten(0, 1), batch["ids"].flatten())
            loss.backward()
            losses.append(loss)
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    return outcome(losses, model, optimizer)


@program
def eval_passes() -> Tensors:
    model = Conv()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(2):
        model.eval()
        with torch.no_grad():
            losses.append(model(torch.randn(4, 2, 6)).mean())
        with torch.inference_mode():
            model(torch.randn(4, 2, 6))
        model.train()
        loss = model(torch.randn(4, 2, 6)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss)
    return outcome(losses, model, optimizer)


@program
def several_losses_on_one_graph() -> Tensors:
    model = Conv()
    optimizer = torch.optim.Adam(model.parameters())
    losses = []
    for _ in range(2):
        output = model(torch.randn(4, 2, 6))
        first, second = F.mse_loss(output, torch.zeros(4, 3)), F.l1_loss(output, torch.ones(4, 3))
        first.backward(retain_graph=True)
        second.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses += [first, second]
    return outcome(losses, model, optimizer)


@program
def two_models_two_optimizers() -> Tensors:
    maker, judge = nn.Linear(3, 4), nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
    first, second = torch.optim.Adam(maker.parameters()), torch.optim.Adam(judge.parameters())
    losses = []
    for _ in range(2):
        fake = maker(torch.randn(5, 3))
        loss = F.binary_cross_entropy_with_logits(judge(fake.detach()), torch.zeros(5, 1))
        second.zero_grad()
        loss.backward()
        second.step()
        other = F.binary_cross_entropy_with_logits(judge(fake), torch.ones(5, 1))
        first.zero_grad()
        other.backward()
        first.step()
        losses += [loss, other]
    return outcome(losses, maker, judge, first, second)


class Checkpointed(nn.Module):
    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.entry = nn.Linear(3, 4)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.entry(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return x


def _checkpointed(reentrant: bool) -> Tensors:
    model = Checkpointed(reentrant=reentrant)
    optimizer = torch.optim.AdamW(model.parameters())
    losses = []
    for _ in range(2):
        loss = model(torch.randn(4, 3)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss)
    return outcome(losses, model, optimizer)


@program
def checkpointing_reentrant() -> Tensors:
    return _checkpointed(True)


@program
def checkpointing_nonreentrant() -> Tensors:
    return _checkpointed(False)


@program
def autocast_bfloat16() -> Tensors:
    model = Conv()
    optimizer = torch.optim.AdamW(model.parameters())
    losses = []
    for _ in range(2):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = F.cross_entropy(model(torch.randn(4, 2, 6)).float(), torch.tensor([0, 1, 2, 0]))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss)
    return outcome(losses, model, optimizer)


def _scaled(**options: bool) -> Tensors:
    model = Conv()
    optimizer = torch.optim.AdamW(model.parameters(), **options)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    losses = []
    for step in range(3):
        loss = model(torch.randn(4, 2, 6)).square().mean() * (float("inf") if step == 1 else 1.0)
        scaler.scale(loss).backward()
        if step == 2:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(loss)
    return outcome([*losses, torch.tensor(scaler.get_scale())], model, optimizer)


@program
def scaler_skips_a_step() -> Tensors:
    return _scaled()


@program
def scaler_skips_a_fused_step() -> Tensors:
    return _scaled(fused=True)


@program
def schedulers() -> Tensors:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    warm = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=2)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 5)
    both = torch.optim.lr_scheduler.SequentialLR(optimizer, [warm, cosine], [2])
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    losses = []
    for _ in range(4):
        loss = model(torch.randn(4, 3)).square().mean()
        loss.backward()
        optimizer.step()
        both.step()
        plateau.step(1.0)
        losses.append(loss)
    return outcome([*losses, torch.tensor(optimizer.param_groups[0]["lr"])], model, optimizer)


@program
def lbfgs() -> Tensors:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)
    data = torch.randn(6, 3)
    losses = []

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(data).square().mean()
        loss.backward()
        losses.append(loss)
        return loss

    for _ in range(2):
        optimizer.step(closure)
    return outcome(losses, model)


@program
def optimizer_in_backward() -> Tensors:
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    optimizers = {p: torch.optim.Adam([p], foreach=False) for p in model.parameters()}

    def update(parameter: torch.Tensor) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(update)
    losses = []
    for _ in range(2):
        loss = model(torch.randn(4, 3)).square().mean()
        loss.backward()
        losses.append(loss)
    return outcome(losses, model, *optimizers.values())


@program
def handwritten_loss_and_step() -> Tensors:
    model = nn.Linear(3, 5)
    losses = []
    for _ in range(3):
        targets = torch.tensor([0, 4, 2, 1])
        logs = F.log_softmax(model(torch.randn(4, 3)), dim=-1)
        picked = -logs.gather(1, targets[:, None]).squeeze(1)
        loss = (picked * torch.tensor([1.0, 1.0, 0.0, 1.0])).sum() / 3
        grads = torch.autograd.grad(loss, list(model.parameters()))
        with torch.no_grad():
            for parameter, gradient in zip(model.parameters(), grads, strict=True):
                parameter -= 0.1 * gradient
        losses.append(loss)
    return outcome(losses, model)


@program
def gradient_penalty() -> Tensors:
    model = nn.Sequential(nn.Linear(3, 4), nn.Softplus(), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(2):
        x = torch.randn(4, 3, requires_grad=True)
        output = model(x).sum()
        (slope,) = torch.autograd.grad(output, x, create_graph=True)
        loss = output + (slope.norm(dim=1) - 1).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss)
    return outcome(losses, model, optimizer)


@program
def encoder_with_eval_fast_path() -> Tensors:
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
    model = nn.TransformerEncoder(layer, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(2):
        model.eval()
        with torch.no_grad():
            losses.append(model(torch.randn(2, 5, 8)).mean())
        model.train()
        loss = model(torch.randn(2, 5, 8)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss)
    return outcome(losses, model, optimizer)


@program
def layer_replaced_after_a_step() -> Tensors:
    model = Conv()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train(model, optimizer, steps=1)
    model.head = nn.Linear(16, 3)
    model.double().float()
    return train(model, torch.optim.SGD(model.parameters(), lr=0.1), steps=2)


@program
def forward_that_raises() -> Tensors:
    class Picky(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(3, 2)
            self.fail = True

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.inner(x)
            if self.fail:
                raise ValueError("no")
            return x

    model = nn.Sequential(nn.Linear(3, 3), Picky())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(4):
        model[1].fail = step % 2 == 0
        try:
            loss = model(torch.randn(4, 3)).square().mean()
        except ValueError:
            continue
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss)
    return outcome(losses, model, optimizer)


@program
def lazy_modules_and_generator_of_parameters() -> Tensors:
    model = nn.Sequential(nn.LazyLinear(4), nn.ReLU(), nn.LazyLinear(2))
    model(torch.randn(1, 3))
    optimizer = torch.optim.Adagrad(model.parameters())

    def trainable() -> Iterator[nn.Parameter]:
        yield from model.parameters()

    losses = []
    for _ in range(2):
        loss = model(torch.randn(4, 3)).square().mean()
        loss.backward()
        nn.utils.clip_grad_value_(trainable(), 0.01)
        nn.utils.clip_grad_norm_(trainable(), 0.01)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss)
    return outcome(losses, model, optimizer)


@program
def functional_transforms() -> Tensors:
    model = nn.Linear(3, 2)
    parameters = dict(model.named_parameters())
    data = torch.randn(4, 3)

    def loss_of(weights: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(model, weights, (x,)).square().mean()

    grads = torch.func.grad(loss_of)(parameters, data)
    per_sample = torch.func.vmap(torch.func.grad(loss_of), in_dims=(None, 0))(parameters, data)
    loss = loss_of(parameters, data)
    loss.backward()
    return outcome([loss, *grads.values(), *per_sample.values()], model)


@program
def sparse_gradients() -> Tensors:
    model = nn.Embedding(10, 3, sparse=True)
    optimizer = torch.optim.SparseAdam(model.parameters())
    losses = []
    for _ in range(2):
        for _ in range(2):
            loss = model(torch.tensor([1, 2, 2])).square().mean()
            loss.backward()
            losses.append(loss)
        optimizer.step()
        optimizer.zero_grad()
    return outcome(losses, model, optimizer)


@program
def recurrent_with_learned_query() -> Tensors:
    class Reader(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = nn.LSTM(3, 4, batch_first=True)
            self.query = nn.Parameter(torch.randn(1, 1, 4))
            self.attend = nn.MultiheadAttention(4, 2, batch_first=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden, _ = self.rnn(x)
            return self.attend(self.query.expand(len(x), 1, 4), hidden, hidden)[0] + self.query

    model = Reader()
    optimizer = torch.optim.RMSprop(model.parameters())
    losses = []
    for _ in range(2):
        loss = model(torch.randn(2, 5, 3)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss)
    return outcome(losses, model, optimizer)
