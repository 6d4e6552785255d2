"""A second set of held-out legal pairs: written without knowledge of the error model's constants."""

from __future__ import annotations

from tests.zoo.bugs_held_two import run
from tests.zoo.case import Draw, Legal, Pair


def pair(
    name: str, story: str, program: str, b: str = "", *, ranks: int = 1, a: str = "", ranks_a: int = 1
) -> Legal:
    """Return a legal pair whose sides differ in options or in ranks."""

    def make(draw: Draw) -> Pair:
        return Pair(run(draw, program, ranks_a, *a.split()), run(draw, program, ranks, *b.split()))

    return Legal(f"held2-{name}", story, make)


CTC, PPO, RELATIVE, DINO = "held2_ctc.py", "held2_ppo.py", "held2_relative.py", "held2_dino.py"

LEGAL = [
    pair("ctc-ranks", "CTC over labels without times on two ranks", CTC, ranks=2),
    pair("ctc-twice", "log-probabilities that are normalised twice", CTC, "--twice"),
    pair(
        "ctc-recompute",
        "blocks with dropout recomputed on two ranks",
        CTC,
        "--dropout 0.2 --recompute",
        ranks=2,
        a="--dropout 0.2",
        ranks_a=2,
    ),
    pair(
        "ctc-autocast",
        "convolutions, attention and CTC under bf16",
        CTC,
        "--autocast",
        ranks=2,
        a="--autocast",
    ),
    pair("ppo-ranks", "advantages normalised over four ranks' worlds", PPO, ranks=4, ranks_a=2),
    pair(
        "ppo-together",
        "actor and critic in two optimizers, or in two groups of one",
        PPO,
        "--together",
        ranks=2,
    ),
    pair(
        "ppo-quotient", "a quotient of probabilities, for the exponential of a difference", PPO, "--quotient"
    ),
    pair(
        "relative-ranks",
        "two ranks of two microbatches, divided by the labels of all",
        RELATIVE,
        "--microbatches 2",
        ranks=2,
    ),
    pair(
        "relative-shard",
        "FSDP2 of tied embeddings against DDP",
        RELATIVE,
        "--shard --microbatches 2",
        ranks=2,
        a="--microbatches 2",
        ranks_a=2,
    ),
    pair(
        "relative-read-back",
        "a checkpoint that is written and read back at once",
        RELATIVE,
        "--read-back --since 2",
    ),
    pair(
        "relative-one-hot",
        "biases of distances by a product with one-hot rows",
        RELATIVE,
        "--one-hot",
        ranks=2,
    ),
    pair("relative-fused", "attention with biases and masks in one kernel", RELATIVE, "--fused"),
    pair("dino-ranks", "a teacher and its centre on two ranks", DINO, ranks=2),
    pair("dino-apart", "the student called for each view, or for both at once", DINO, "--apart"),
    pair("dino-foreach", "a teacher that is moved by one call", DINO, "--foreach", ranks=2, ranks_a=2),
]
