"""Mistakes planted in ``programs/split.py``: tensor parallelism by hand, with a layout file.

The reference is the whole model on one rank.
"""

from __future__ import annotations

from collections.abc import Callable

from tests.zoo.case import At, Bug, Draw, Pair, Planted, Run


def sizes(draw: Draw) -> list[str]:
    random = draw.of("split")
    heads = random.choice([2, 4])
    return [
        "--seed", str(random.randrange(1000)),
        "--heads", str(heads),
        "--width", str(heads * random.choice([4, 6])),
        "--hidden", str(random.choice([14, 18, 26])),
        "--length", str(random.choice([6, 9, 11])),
        "--rows", str(random.choice([3, 4, 6])),
    ]  # fmt: skip


def bug(name: str, story: str, code: str, first: At | Callable[[int, int], At], *, plant: str = "") -> Bug:
    """Return a mistake; ``first`` is given the block where it is planted and the step from which it acts."""

    def make(draw: Draw) -> Planted:
        at, since = draw.of(name).choice([0, 1]), draw.of(f"{name} since").choice([1, 2])
        planted = ("--plant", plant or name, "--at", str(at), "--since", str(since))
        b = Run("split.py", 2, (*sizes(draw), *planted), "split.toml")
        pair = Pair(Run("split.py", 1, tuple(sizes(draw))), b)
        return Planted(pair, first(at, since) if callable(first) else first, code)

    return Bug(name, story, make)


BUGS = [
    bug(
        "bias-on-each-rank",
        "a row-parallel layer whose ranks add the bias to their parts of the sum",
        "bias.duplicated", lambda at, since: At(0, "activation", f"blocks.{at}.attention.out", "out"),
    ),
    bug(
        "bias-left-to-nobody",
        "a row-parallel layer that leaves its bias to its caller, which doesn't add it (skip_bias_add)",
        "bias.missing", lambda at, since: At(0, "activation", f"blocks.{at}.attention.out", "out"),
    ),
    bug(
        "denominator-summed-twice",
        "a cross entropy over a split vocabulary sums its denominator over the ranks twice: off by log 2",
        # the gradient is right, the loss is not
        "value.offset", At(0, "activation", "entropy", "out"), plant="summed-twice",
    ),
    bug(
        "padding-in-the-denominator",
        "the rows that pad the vocabulary count in the softmax",
        "vocab.padding", At(0, "activation", "entropy", "out"), plant="padding-in-the-sum",
    ),
    bug(
        "norm-drawn-on-each-rank",
        "a weight that both ranks should hold alike is drawn with each rank's own generator",
        "replica.disagrees", At("init", "param", "norm.weight", "model"),
    ),
    bug(
        "input-gradient-not-summed",
        "a column-parallel layer whose input's gradient is not summed over the ranks",
        # losses agree. What the norm returns, the MLP and its first layer are given is one tensor
        "reduction.missing", lambda at, since: At(0, "activation_grad", f"blocks.{at}.mlp*", "*"),
    ),
    bug(
        "clip-by-own-part",
        "a hand-written clip whose norm leaves out what the other rank holds of the split weights",
        # the norm itself is a number of the program's own: what it scales is the first to be seen
        "clip.local_norm", At(0, "clipped_grad", "*", "*"), plant="norm-of-own-part",
    ),
    bug(
        "rate-by-rank",
        "a rank lowers its learning rate by a condition of its own",
        # the rate is no tensor that ranks hold copies of, but a value of the update
        "optimizer.hyperparameter", lambda at, since: At(since, "schedule", "optimizer.0.group.0", "lr"),
    ),
]  # fmt: skip
