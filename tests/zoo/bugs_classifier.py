"""Mistakes planted in ``programs/classifier.py``: two objectives, batch norm, gradients averaged by hand."""

from __future__ import annotations

from collections.abc import Callable

from tests.zoo.case import At, Bug, Draw, Pair, Planted, Run


def classifier(draw: Draw, ranks: int, *options: str) -> Run:
    random = draw.of("classifier")
    drawn = [
        "--seed", str(random.randrange(1000)),
        "--features", str(random.choice([7, 11, 18])),
        "--width", str(random.choice([12, 15, 20])),
        "--classes", str(random.choice([4, 5, 9])),
    ]  # fmt: skip
    return Run("classifier.py", ranks, (*drawn, *options))


def bug(
    name: str, story: str, code: str, first: Callable[[int], At], *, ranks: int = 1, common: str = "",
    b_only: str = "", a: int = 1,
) -> Bug:  # fmt: skip
    """Return a mistake; ``first`` is given the drawn step from which on rows hold zeros."""

    def make(draw: Draw) -> Planted:
        since = draw.of(name).choice([1, 2])
        shared = (*common.split(), "--since", str(since))
        b = classifier(draw, ranks, *shared, *b_only.split(), "--plant", name)
        return Planted(Pair(classifier(draw, a, *shared), b), first(since), code)

    return Bug(name, story, make)


BUGS = [
    bug(
        "sign-forgotten",
        "a reversal of gradients without its sign: the losses are right, the features are trained wrongly",
        # what comes to the reversal agrees, what leaves it backwards has the other sign
        "value.sign", lambda since: At(0, "activation_grad", "reversal", "in.0"),
    ),
    bug(
        "log-of-zero",
        "a logarithm of counts without a floor: the first zero comes in a later step, on the last rank",
        "value.nonfinite", lambda since: At(since, "activation", "logarithm", "out"), ranks=2,
    ),
    bug(
        "clipped-before-reducing",
        "each rank clips its own gradient, and then they are averaged",
        # the order of clip and reduction is another; on the ladder the reduction comes first, and what it
        # leaves is of gradients that each rank has scaled by a norm of its own
        "ladder.order", lambda since: At(0, "reduced_grad", "*", "grad"),
        ranks=2, a=2, common="--by-hand",
    ),
]  # fmt: skip
