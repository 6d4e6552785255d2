"""Mistakes planted in ``tests/training/parallel.py``: tensors, positions, stages and experts over ranks.

The reference is one rank. What a layout spreads, the diff puts together again, so that a mistake shows where
the whole model's value first differs.
"""

from __future__ import annotations

from tests.zoo.case import At, Bug, Draw, Pair, Planted, Run

PROGRAM = "../../training/parallel.py"
LAYOUTS = "../../../training/layouts/"


def sizes(draw: Draw, vocabulary: str = "") -> list[str]:
    """Return options for a drawn model: two or four heads, which ranks share."""
    random = draw.of("parallel")
    heads = random.choice([2, 4])
    width = heads * random.choice([4, 6])
    found = [
        "--seed", str(random.randrange(100)),
        "--heads", str(heads),
        "--width", str(width),
        "--hidden", str(random.choice([n for n in (13, 17, 22) if n != width])),
    ]  # fmt: skip
    return [*found, "--vocabulary", vocabulary or str(random.choice([38, 50, 62]))]


def bug(
    name: str, story: str, code: str, first: At, *, plant: str, spread: str, model: str = "", ranks: int = 2,
    layout: str = "", vocabulary: str = "",
) -> Bug:  # fmt: skip
    """Return a mistake: one rank trains ``model``, and ``ranks`` train it with ``spread`` and the plant."""

    def make(draw: Draw) -> Planted:
        shared = (*sizes(draw, vocabulary), *model.split())
        b = Run(PROGRAM, ranks, (*shared, *spread.split(), "--plant", plant), layout and LAYOUTS + layout)
        return Planted(Pair(Run(PROGRAM, 1, shared), b), first, code)

    return Bug(name, story, make)


SHARED_KV = "--kv-heads 1"

BUGS = [
    bug(
        "tp-bias-before-the-sum",
        "a row-parallel layer whose ranks all add the bias before the sum over ranks",
        "bias.duplicated", At(0, "activation", "layers.1.attention.out", "out"),
        plant="bias-on-every-rank", spread="--layout tp",
    ),
    bug(
        "fsdp-tp-bias-before-the-sum",
        "the same with two ranks of tensor and two of data parallelism",
        "bias.duplicated", At(0, "activation", "layers.1.attention.out", "out"),
        plant="bias-on-every-rank", spread="--layout fsdp2-tp", ranks=4,
    ),
    bug(
        "tp-shared-kv",
        "key-value heads that ranks share: each keeps the gradient of its own queries (GQA under TP)",
        # backward reaches the last layer first, but the headline is the first in the forward's order of
        # what does not depend on another: the last layer's gradient depends on nothing that is wrong
        "reduction.missing", At(0, "activation_grad", "layers.1.attention.kv", "out"),
        plant="kv-not-summed", spread="--layout tp", model=SHARED_KV,
    ),
    bug(
        "sp-norms",
        "sequence parallelism: norms' gradients are not summed over the ranks (Megatron-LM#1446)",
        # each rank's gradient is of its own positions
        "reduction.missing", At(0, "clipped_grad", "*norm.*", "before"),
        plant="norm-grads-not-reduced", spread="--layout tp-sp",
    ),
    bug(
        "pp-tied",
        "an embedding that first and last stage share: their gradients are not summed",
        "tied.not_summed", At(0, "clipped_grad", "token.weight", "before"),
        plant="tied-not-summed", spread="--layout pp", model="--depth 3 --tied", layout="pp-tied.toml",
    ),
    bug(
        "cp-positions",
        "context parallel ranks that all count positions from 0",
        "position.shifted", At(0, "activation", "position", "in.0"),
        plant="local-positions", spread="--layout cp", layout="cp.toml",
    ),
    bug(
        "tp-padded-vocabulary",
        "the vocabulary is padded for the ranks, and the loss normalises over the padding, too",
        # the scores agree up to the padding, the loss is the first that sees all of them
        "vocab.padding", At(0, "loss", "cross_entropy", "sum"),
        plant="loss-over-padding", spread="--layout tp --pad-vocabulary 64", layout="tp-padded.toml",
        vocabulary="50",
    ),
    bug(
        "ddp-batch-norm",
        "batch norm without SyncBatchNorm: each rank has statistics of its own rows",
        "batch.coupled", At(0, "activation", "batch_norm.norm", "out"),
        plant="", spread="--layout ddp", model="--batch-norm",
    ),
    bug(
        "cp-labels-at-the-ends",
        "context parallel ranks that shift the labels of their own part: the last of each part is lost",
        # tokens are right; the labels are what the loss is given
        "input.different", At(0, "loss", "cross_entropy", "target"),
        plant="labels-shifted-on-each-rank", spread="--layout cp", layout="cp.toml",
    ),
    bug(
        "cp-averaged",
        "context parallel gradients averaged, where each rank's is a part of the sum over positions",
        # the sum that the reduction leaves is the gradient; what the program divides it to is what it clips
        "scale.world_size", At(0, "clipped_grad", "*", "before"),
        plant="averaged-over-positions", spread="--layout cp-zigzag", layout="cp-zigzag.toml",
    ),
    bug(
        "cp-kv-gradients",
        "keys and values that were gathered get the gradient of the rank's own queries alone",
        # what other ranks' queries give is in neither trace, so that no hypothesis can be tested
        "unexplained", At(0, "activation_grad", "layers.1.attention.kv", "out"),
        plant="kv-grads-not-summed", spread="--layout cp", layout="cp.toml",
    ),
    bug(
        "ep-experts-divided",
        "gradients of experts are divided by the ranks, though each expert is on one rank alone",
        "scale.world_size", At(0, "clipped_grad", "layers.*.mlp.experts.*", "before"),
        plant="experts-divided", spread="--layout ep", model="--experts", layout="ep.toml",
    ),
    bug(
        "ep-router",
        "the router's gradient is not summed over the ranks that read rows of their own",
        "reduction.missing", At(0, "clipped_grad", "layers.*.mlp.router.weight", "before"),
        plant="router-not-reduced", spread="--layout ep", model="--experts", layout="ep.toml",
    ),
    bug(
        "pp-divided-again",
        "an interleaved pipeline whose objective is divided by the microbatches twice",
        "scale.accumulation", At(0, "clipped_grad", "*", "before"),
        plant="divided-by-microbatches", spread="--layout pp-interleaved", model="--depth 5",
    ),
    bug(
        "tp-key-value-rows",
        "key and value rows of a fused weight are loaded in the other order on each rank",
        # for each head 2 blocks that change places, within what the ranks hold
        "layout.permuted_blocks", At("init", "param", "layers.1.attention.kv.weight", "model"),
        plant="kv-blocks-swapped", spread="--layout tp",
    ),
    bug(
        "fsdp-tp-key-value-rows",
        "the same under two ranks of tensor and two of data parallelism",
        "layout.permuted_blocks", At("init", "param", "layers.1.attention.kv.weight", "model"),
        plant="kv-blocks-swapped", spread="--layout fsdp2-tp", ranks=4,
    ),
]  # fmt: skip
