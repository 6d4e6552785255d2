"""Legal pairs of a small language model: how a batch is spread, summed, cut, scaled and recomputed."""

from __future__ import annotations

from collections.abc import Callable

from tests.zoo.case import Draw, Legal, Pair, Run


def sizes(draw: Draw, what: str = "") -> list[str]:
    """Return options for a drawn model and batch; 8 rows, so that ranks and microbatches share evenly."""
    random = draw.of(f"lm {what}".strip())
    heads = random.choice([1, 2, 3, 5])
    return [
        "--seed", str(random.randrange(1000)),
        "--heads", str(heads),
        "--width", str(heads * random.choice([5, 7, 8, 11])),
        "--vocabulary", str(random.choice([37, 61, 64, 101])),
        "--length", str(random.choice([6, 9, 13, 16])),
    ]  # fmt: skip


def lm(draw: Draw, ranks: int, options: str, common: str = "", what: str = "") -> Run:
    return Run("lm.py", ranks, (*sizes(draw, what), *common.split(), *options.split()))


def pair(
    name: str, story: str, b: str, *, ranks: int = 1, a: str = "", ranks_a: int = 1, common: str = ""
) -> Legal:
    """Return a legal pair whose sides differ in options or in ranks."""

    def make(draw: Draw) -> Pair:
        return Pair(lm(draw, ranks_a, a, common), lm(draw, ranks, b, common))

    return Legal(name, story, make)


Make = Callable[[Draw], Pair]

LEGAL = [
    pair("lm-again", "the same program twice, once with gradients zeroed and kept", "--zero zero"),
    pair("lm-ddp", "one rank against two under DDP", "", ranks=2),
]
