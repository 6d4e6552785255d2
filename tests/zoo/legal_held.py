"""Held-out legal pairs: written after the detectors and constants were frozen, before any diff of them."""

from __future__ import annotations

from tests.zoo.bugs_held import run
from tests.zoo.case import Draw, Legal, Pair


def pair(
    name: str, story: str, program: str, b: str = "", *, ranks: int = 1, a: str = "", ranks_a: int = 1
) -> Legal:
    """Return a legal pair whose sides differ in options or in ranks."""

    def make(draw: Draw) -> Pair:
        return Pair(run(draw, program, ranks_a, *a.split()), run(draw, program, ranks, *b.split()))

    return Legal(name, story, make)


LEGAL = [
    pair("held-vit-ranks", "averaged weights and label smoothing on two ranks", "held_vit.py", ranks=2),
    pair("held-vit-unfold", "patches cut out, then a product, for a convolution", "held_vit.py", "--unfold"),
    pair(
        "held-vit-soft-targets",
        "the loss is given smoothed probabilities in the place of classes",
        "held_vit.py",
        "--soft-targets",
    ),
    pair("held-towers-gathered", "negatives gathered from two ranks", "held_towers.py", ranks=2),
    pair(
        "held-towers-whole-loss",
        "each rank takes the loss of all rows, or of its own rows against all",
        "held_towers.py",
        "--whole-loss",
        ranks=2,
        ranks_a=2,
    ),
    pair("held-towers-text-first", "towers called in the other order", "held_towers.py", "--text-first"),
    pair("held-dpo-ranks", "pairs of answers on two ranks", "held_dpo.py", ranks=2),
    pair("held-dpo-two-calls", "chosen and rejected answers in two calls", "held_dpo.py", "--two-calls"),
    pair(
        "held-dpo-inference-mode",
        "the reference called in inference mode or without a graph",
        "held_dpo.py",
        "--inference-mode",
    ),
    pair(
        "held-gru-ranks",
        "two ranks of two microbatches, divided by all tokens of the window",
        "held_gru.py",
        "--microbatches 2",
        ranks=2,
    ),
    pair("held-gru-time-major", "a recurrent layer given time first", "held_gru.py", "--time-major"),
    pair(
        "held-gru-groups",
        "the groups of the optimizer in the other order",
        "held_gru.py",
        "--groups-reversed",
        ranks=2,
    ),
    pair(
        "held-gru-owners",
        "each gradient summed on the rank that owns it and sent to the others, against DDP",
        "held_gru.py",
        "--reduce-to-owners --microbatches 2",
        ranks=2,
        a="--microbatches 2",
        ranks_a=2,
    ),
    pair(
        "held-denoise-by-hand",
        "a mean squared error by hand, rows shared unevenly by two ranks",
        "held_denoise.py",
        "--by-hand",
        ranks=2,
    ),
    pair("held-denoise-ranks", "five rows of the last batch on two ranks", "held_denoise.py", ranks=2),
]
