"""Legal pairs of a small language model: how a batch is spread, summed, cut, scaled and recomputed."""

from __future__ import annotations

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
    drawn = sizes(draw, what)
    longer = str(int(drawn[drawn.index("--length") + 1]) + 7)  # as long as there are positions
    return Run("lm.py", ranks, (*drawn, *f"{common} {options}".replace("LONGER", longer).split()))


def pair(
    name: str, story: str, b: str, *, ranks: int = 1, a: str = "", ranks_a: int = 1, common: str = ""
) -> Legal:
    """Return a legal pair whose sides differ in options or in ranks."""

    def make(draw: Draw) -> Pair:
        return Pair(lm(draw, ranks_a, a, common), lm(draw, ranks, b, common))

    return Legal(name, story, make)


WIDE = "--width 512 --heads 8 --depth 1"

LEGAL = [
    pair("lm-again", "the same program twice, once with gradients zeroed and kept", "--zero zero"),
    pair("lm-ddp", "one rank against two under DDP", "", ranks=2),
    pair("lm-ddp-four", "one rank against four under DDP", "", ranks=4),
    pair(
        "lm-buckets",
        "DDP with one bucket a parameter that gradients view",
        "--bucket-mb 1e-4 --bucket-view",
        ranks=2,
        ranks_a=2,
    ),
    pair("lm-static-graph", "DDP with a static graph", "--static-graph", ranks=2, ranks_a=2),
    pair(
        "lm-no-sync",
        "gradients reduced once a step, or after every microbatch",
        "--no-sync",
        ranks=2,
        ranks_a=2,
        common="--microbatches 2",
    ),
    pair(
        "lm-flat-sum",
        "gradients flattened into a copy and summed by hand, against DDP",
        "--reduce flat",
        ranks=2,
        ranks_a=2,
    ),
    pair(
        "lm-sum-then-divide",
        "local sums, one sum over ranks, then a division by tokens, against DDP's average",
        "--reduce sum-then-divide",
        ranks=2,
        ranks_a=2,
    ),
    pair(
        "lm-sum-then-divide-alone",
        "gradients of a sum divided by the tokens afterwards, on one rank",
        "--reduce sum-then-divide --microbatches 2",
    ),
    pair(
        "lm-foreach",
        "AdamW by foreach and by a loop over parameters",
        "--implementation foreach",
        a="--implementation for-loop",
    ),
    pair(
        "lm-fused",
        "fused AdamW and foreach",
        "--implementation fused",
        a="--implementation foreach",
        common="--steps 5",
    ),
    pair(
        "lm-fused-scaler",
        "fused AdamW that divides the loss scale out itself",
        "--implementation fused",
        a="--implementation for-loop",
        common="--scaler 512",
    ),
    pair(
        "lm-nesterov",
        "SGD with Nesterov momentum, fused on two ranks, a loop on one",
        "--implementation fused",
        a="--implementation for-loop",
        ranks=2,
        common="--optimizer nesterov --steps 4",
    ),
    pair(
        "lm-adam", "Adam without weight decay, four ranks", "", ranks=4, common="--optimizer adam --clip no"
    ),
    pair("lm-recompute-reentrant", "blocks recomputed, the reentrant kind", "--checkpoint reentrant"),
    pair("lm-recompute", "blocks recomputed on two ranks", "--checkpoint non-reentrant", ranks=2),
    pair("lm-recompute-selective", "only the MLPs recomputed", "--checkpoint selective"),
    pair("lm-accumulate", "four microbatches against one", "--microbatches 4"),
    pair(
        "lm-accumulate-ranks",
        "two ranks of two microbatches against one rank of four",
        "--microbatches 2",
        a="--microbatches 4",
        ranks=2,
    ),
    pair(
        "lm-accumulate-odd",
        "eight microbatches of one row against two ranks of one",
        "--microbatches 8",
        ranks_a=2,
    ),
    pair("lm-sampler", "the batch dealt out in turns and in blocks", "--sampler strided", ranks=2, ranks_a=2),
    pair(
        "lm-shuffled", "the rows of the batch in another order, on four ranks", "--sampler shuffled", ranks=4
    ),
    pair("lm-padding", "the same rows padded further", "--pad-to LONGER"),
    pair("lm-padding-ranks", "each rank pads to its own longest row", "", ranks=4, a="--pad-to LONGER"),
    pair("lm-attention-math", "explicit softmax against the math kernel", "--attention math"),
    pair(
        "lm-attention-flash",
        "the math kernel against flash attention",
        "--attention flash",
        a="--attention math",
    ),
    pair(
        "lm-attention-flash-ranks",
        "explicit softmax on one rank, flash attention on two",
        "--attention flash",
        ranks=2,
        common="--steps 6",
    ),
    pair(
        "lm-attention-autocast",
        "explicit softmax and flash attention under bf16",
        "--attention flash",
        common="--autocast",
    ),
    pair(
        "lm-k-bias",
        "a bias of attention keys, whose exact gradient is 0, under AdamW",
        "",
        ranks=2,
        common="--k-bias --steps 5",
    ),
    pair(
        "lm-k-bias-kernels",
        "the same bias, through other kernels",
        "--attention default",
        common="--k-bias --steps 5",
    ),
    pair(
        "lm-k-bias-twenty",
        "the same bias over twenty steps in bf16",
        "",
        ranks=2,
        common="--k-bias --steps 20 --autocast --depth 1",
    ),
    pair("lm-scaler", "a loss scale that is a power of two, against none", "--scaler 4096"),
    pair("lm-scaler-odd", "a loss scale of 1000, against none, on two ranks", "--scaler 1000", ranks=2),
    pair("lm-loss-hand", "cross entropy by log_softmax and gather", "--loss hand"),
    pair(
        "lm-loss-mean",
        "mean reduction weighed by tokens against a sum",
        "--loss mean",
        ranks=2,
        a="--loss sum",
    ),
    pair("lm-loss-none", "losses token by token, summed by the program", "--loss none", a="--loss mean"),
    pair("lm-loss-chunked", "the loss in chunks of 17 tokens", "--loss chunked"),
    pair("lm-clip-hand", "gradients clipped by hand", "--clip hand"),
    pair(
        "lm-clip-loop",
        "gradients clipped by foreach and by a loop, on two ranks",
        "--clip for-loop",
        a="--clip foreach",
        ranks=2,
        common="--max-norm 0.05",
    ),
    pair(
        "lm-schedule",
        "a learning rate of LambdaLR and one set by hand",
        "--schedule hand",
        a="--schedule lambda",
        common="--steps 5",
    ),
    pair(
        "lm-cosine",
        "cosine decay by a scheduler and by hand, over ten steps",
        "--schedule cosine-hand",
        a="--schedule cosine",
        common="--steps 10 --depth 1",
    ),
    pair("lm-tied", "tied embeddings on two ranks", "", ranks=2, common="--tied"),
    pair(
        "lm-tied-accumulate",
        "tied embeddings, four microbatches with recomputing",
        "--microbatches 4 --checkpoint non-reentrant",
        common="--tied",
    ),
    pair("lm-autocast", "bf16 autocast on two ranks against one", "", ranks=2, common="--autocast"),
    pair(
        "lm-autocast-accumulate",
        "bf16 autocast, four microbatches against one",
        "--microbatches 4",
        common="--autocast --steps 5",
    ),
    pair("lm-bf16", "a model in bf16 on two ranks against one", "", ranks=2, common="--dtype bfloat16"),
    pair(
        "lm-bf16-sampler",
        "a model in bf16, rows in another order, two microbatches",
        "--sampler shuffled --microbatches 2",
        common="--dtype bfloat16 --optimizer nesterov",
    ),
    pair("lm-fp64", "float64 on two ranks against one", "", ranks=2, common="--dtype float64"),
    pair("lm-fp64-fp32", "float32 against float64", "", a="--dtype float64"),
    pair("lm-autocast-fp32", "bf16 autocast against float32", "--autocast"),
    pair("lm-twenty", "twenty steps on two ranks against one", "", ranks=2, common="--steps 20"),
    pair(
        "lm-twenty-sgd",
        "twenty steps of SGD with momentum, four microbatches",
        "--microbatches 4",
        common="--steps 20 --optimizer nesterov",
    ),
    pair(
        "lm-twenty-bf16",
        "twenty steps under bf16 autocast on two ranks",
        "",
        ranks=2,
        common="--steps 20 --autocast",
    ),
    pair("lm-wide", "512 features: long sums", "--attention flash", ranks=2, common=WIDE),
    pair(
        "lm-wide-bf16",
        "512 features under bf16 autocast",
        "--microbatches 2",
        ranks=2,
        common=WIDE + " --autocast",
    ),
    pair("lm-large", "embeddings thirty times as large", "", ranks=2, common="--amplify 30"),
    pair(
        "lm-large-bf16",
        "large embeddings under bf16 autocast",
        "--attention math",
        common="--amplify 30 --autocast",
    ),
    pair("lm-quiet", "gradients that nearly vanish", "", ranks=2, common="--quiet-head --clip no"),
    pair("lm-deep", "nine blocks", "--microbatches 2", ranks=2, common="--depth 9"),
]
