"""Mistakes planted in ``programs/pooling.py``: padding that is seen, and an update that goes wrong later."""

from __future__ import annotations

from collections.abc import Callable

from tests.zoo.case import At, Bug, Draw, Pair, Planted, Run


def sizes(draw: Draw) -> list[str]:
    random = draw.of("pooling")
    heads = random.choice([2, 3])
    return [
        "--seed", str(random.randrange(1000)),
        "--heads", str(heads),
        "--width", str(heads * random.choice([4, 6])),
        "--vocabulary", str(random.choice([30, 40, 55])),
        "--length", str(random.choice([8, 10, 13])),
        "--classes", str(random.choice([4, 5, 9])),
    ]  # fmt: skip


def bug(name: str, story: str, code: str, first: Callable[[int, int], At], *, ranks: int = 1) -> Bug:
    """Return a mistake; ``first`` is given the block where it is planted and the step from which it acts."""

    def make(draw: Draw) -> Planted:
        at, since = draw.of(name).choice([0, 1]), draw.of(f"{name} since").choice([1, 2, 3])
        planted = ("--plant", name, "--at", str(at), "--since", str(since))
        pair = Pair(
            Run("pooling.py", 1, tuple(sizes(draw))), Run("pooling.py", ranks, (*sizes(draw), *planted))
        )
        return Planted(pair, first(at, since), code)

    return Bug(name, story, make)


BUGS = [
    bug(
        "padding-attended",
        "attention without the padding mask (encoders that are given batches of unequal rows)",
        "mask.padding_leak", lambda at, since: At(0, "activation", f"blocks.{at}.attention.mixing", "out"),
        ranks=2,
    ),
    bug(
        "padding-pooled",
        "the mean over a row counts its padding",
        "mask.padding_leak", lambda at, since: At(0, "activation", "pool", "out"),
    ),
    bug(
        "momentum-restarted",
        "an optimizer that is made anew in the middle of a run begins without momentum",
        # nothing tells the momentum between steps: it is the step's update that starts from nothing
        "optimizer.lost_moment", lambda at, since: At(since, "optimizer_state", "*", "momentum_buffer"),
    ),
    bug(
        "scheduled-twice",
        "the scheduler is stepped at the end of an epoch, too",
        "schedule.position", lambda at, since: At(since, "schedule", "scheduler.0", "position"), ranks=2,
    ),
]  # fmt: skip
