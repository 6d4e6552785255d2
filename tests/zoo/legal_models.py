"""Legal pairs of convolutions, encoders, translators, adapters, experts, and of torch's wrappers."""

from __future__ import annotations

from tests.zoo.case import Draw, Legal, Pair, Run

SIZES: dict[str, dict[str, list[int]]] = {
    "conv.py": {"channels": [9, 12, 15], "size": [9, 11, 14], "classes": [3, 7, 10]},
    "encoder.py": {
        "heads": [1, 2, 4],
        "width": [16, 20, 28],
        "vocabulary": [31, 47, 64],
        "length": [8, 12, 15],
    },
    "seq2seq.py": {"heads": [1, 3], "width": [12, 18, 21], "vocabulary": [19, 29, 50], "length": [6, 9, 11]},
    "finetune.py": {"features": [5, 10], "width": [13, 21, 32], "rank": [1, 3, 4]},
    "moe.py": {"experts": [3, 4, 6], "width": [10, 14, 17], "vocabulary": [23, 43], "length": [5, 8]},
    "llama.py": {
        "head-dim": [4, 6, 10],
        "hidden": [20, 28, 44],
        "vocabulary": [37, 53, 96],
        "length": [7, 9, 12],
    },
    "handsplit.py": {
        "head-dim": [3, 5, 8],
        "hidden": [20, 36, 44],
        "vocabulary": [29, 41],
        "length": [7, 10],
    },
}
"""The sizes that are drawn; some of them are no multiple of anything."""


def run(draw: Draw, program: str, ranks: int, options: str, layout: str = "") -> Run:
    random = draw.of(program)
    drawn = ["--seed", str(random.randrange(1000))]
    for name, values in SIZES[program].items():
        drawn += [f"--{name}", str(random.choice(values))]
    return Run(program, ranks, (*drawn, *options.split()), layout)


def pair(
    name: str, story: str, program: str, b: str, *, ranks: int = 1, a: str = "", ranks_a: int = 1,
    common: str = "", layout: str = "", options: tuple[str, ...] = (),
) -> Legal:  # fmt: skip
    """Return a legal pair whose sides differ in options or in ranks."""

    def make(draw: Draw) -> Pair:
        return Pair(
            run(draw, program, ranks_a, f"{common} {a}"),
            run(draw, program, ranks, f"{common} {b}", layout),
            options,
        )

    return Legal(name, story, make)


LEGAL = [
    pair("conv-ranks", "GroupNorm and convolutions on two ranks", "conv.py", "", ranks=2),
    pair(
        "conv-four",
        "the same on four, with microbatches in the reference",
        "conv.py",
        "",
        ranks=4,
        a="--microbatches 4",
    ),
    pair("conv-channels-last", "images in another memory format", "conv.py", "--channels-last"),
    pair(
        "conv-smoothing",
        "label smoothing by hand",
        "conv.py",
        "--smoothing hand --steplr hand",
        common="--steps 5",
    ),
    pair(
        "conv-pool",
        "a mean in place of a pooling module, clipping by value",
        "conv.py",
        "--microbatches 2",
        a="--implementation fused",
        common="--pool mean --clip-value 0.01",
    ),
    pair(
        "conv-autocast",
        "convolutions under bf16 autocast on two ranks",
        "conv.py",
        "",
        ranks=2,
        common="--autocast",
    ),
    pair("encoder-ranks", "padding masks and two losses on two ranks", "encoder.py", "", ranks=2),
    pair("encoder-padding", "an encoder's rows padded further", "encoder.py", "--pad-to 18"),
    pair(
        "encoder-mask",
        "a mask that is added in place of one of padding",
        "encoder.py",
        "--mask additive",
        options=("--allow-missing", "layers.*"),
    ),
    pair(
        "encoder-select",
        "the loss of selected tokens only",
        "encoder.py",
        "--loss select",
        ranks=2,
        common="--norm-first",
    ),
    pair(
        "encoder-accumulate",
        "four microbatches, each padded to its own length",
        "encoder.py",
        "--microbatches 4",
    ),
    pair(
        "encoder-autocast", "an encoder under bf16 autocast", "encoder.py", "", ranks=2, common="--autocast"
    ),
    pair("seq2seq-ranks", "an encoder-decoder in small buckets", "seq2seq.py", "", ranks=2),
    pair(
        "seq2seq-gru",
        "a recurrent layer, four microbatches",
        "seq2seq.py",
        "--microbatches 4",
        common="--gru",
    ),
    pair("seq2seq-order", "the rows of each batch in reverse order", "seq2seq.py", "--shuffle", ranks=2),
    pair("seq2seq-loss", "cross entropy by logsumexp", "seq2seq.py", "--loss hand"),
    pair(
        "seq2seq-rmsprop",
        "RMSprop by foreach and by a loop, on two ranks",
        "seq2seq.py",
        "--foreach yes",
        ranks=2,
        common="--optimizer rmsprop",
    ),
    pair(
        "seq2seq-adagrad",
        "Adagrad, two microbatches",
        "seq2seq.py",
        "--microbatches 2",
        common="--optimizer adagrad",
    ),
    pair("finetune-ranks", "adapters on a frozen trunk, two heads, two ranks", "finetune.py", "", ranks=2),
    pair("finetune-no-grad", "the frozen trunk run without a graph", "finetune.py", "--trunk no-grad"),
    pair(
        "finetune-merged",
        "adapters applied as one matrix",
        "finetune.py",
        "--adapter together",
        options=("--allow-missing", "adapted.*.base"),
    ),
    pair("finetune-twice", "one backward pass for each loss", "finetune.py", "--backward twice"),
    pair(
        "finetune-accumulate", "three microbatches on four ranks", "finetune.py", "--microbatches 3", ranks=4
    ),
    pair("moe-ranks", "experts and a loss of the router, on two ranks", "moe.py", "", ranks=2),
    pair("moe-dense", "every expert computes every token", "moe.py", "--dispatch dense"),
    pair("moe-stack", "answers of experts gathered before they are summed", "moe.py", "--combine stack"),
    pair("moe-accumulate", "experts, four microbatches", "moe.py", "--microbatches 4", ranks=2),
    pair("llama-ddp", "RMSNorm, rotary positions, grouped queries, two ranks", "llama.py", "", ranks=2),
    pair("llama-fsdp2", "FSDP2 against DDP", "llama.py", "--spread fsdp2", ranks=2, ranks_a=2),
    pair(
        "llama-fsdp2-kept",
        "FSDP2 that keeps parameters gathered, four ranks",
        "llama.py",
        "--spread fsdp2-kept",
        ranks=4,
    ),
    pair(
        "llama-fsdp2-mixed",
        "FSDP2 in bf16 with sums in float32, against itself with microbatches",
        "llama.py",
        "--spread fsdp2 --microbatches 2",
        ranks=2,
        a="--spread fsdp2",
        ranks_a=2,
        common="--precision mixed",
    ),
    pair("llama-fsdp1", "FSDP1 against DDP", "llama.py", "--spread fsdp1", ranks=2, ranks_a=2),
    pair("llama-hsdp", "replicas of shards", "llama.py", "--spread hsdp", ranks=4),
    pair("llama-zero1", "optimizer state dealt out to ranks", "llama.py", "--spread zero1", ranks=2),
    pair("llama-tp", "tensor parallel by DTensor", "llama.py", "--spread tp", ranks=2),
    pair(
        "llama-tp-four",
        "tensor parallel over four ranks against two",
        "llama.py",
        "--spread tp",
        ranks=4,
        a="--spread tp",
        ranks_a=2,
        common="--kv-heads 4",
    ),
    pair("llama-fsdp2-tp", "both on four ranks", "llama.py", "--spread fsdp2-tp", ranks=4),
    pair(
        "llama-fsdp2-tp-ten",
        "both, with recomputing, ten steps",
        "llama.py",
        "--spread fsdp2-tp --checkpoint",
        ranks=4,
        common="--steps 10 --depth 1",
    ),
    pair(
        "llama-muon",
        "Muon for matrices, AdamW for the rest, two ranks",
        "llama.py",
        "",
        ranks=2,
        common="--muon",
    ),
    pair(
        "llama-muon-accumulate",
        "Muon, four microbatches, eight steps",
        "llama.py",
        "--microbatches 4",
        common="--muon --steps 8 --depth 1",
    ),
    pair(
        "llama-muon-bf16",
        "Muon under bf16 autocast",
        "llama.py",
        "",
        ranks=2,
        common="--muon --precision amp",
    ),
    pair("llama-kernels", "grouped attention written out as sums", "llama.py", "--grouped einsum"),
    pair(
        "llama-native",
        "grouped queries inside the kernel",
        "llama.py",
        "--grouped native",
        a="--kernel explicit",
    ),
    pair("llama-complex", "rotary positions as complex numbers", "llama.py", "--rotary complex"),
    pair("llama-norm", "torch's RMSNorm against one by hand", "llama.py", "--norm torch", common="--steps 5"),
    pair(
        "llama-amp",
        "bf16 autocast, recomputing on two ranks",
        "llama.py",
        "--checkpoint",
        ranks=2,
        common="--precision amp",
    ),
    pair("llama-bf16", "all in bf16, two ranks", "llama.py", "", ranks=2, common="--precision bf16"),
    pair(
        "llama-bf16-twenty",
        "all in bf16, two microbatches, twenty steps",
        "llama.py",
        "--microbatches 2",
        common="--precision bf16 --steps 20 --depth 1",
    ),
    pair(
        "llama-fp64-tp",
        "float64, tensor parallel",
        "llama.py",
        "--spread tp",
        ranks=2,
        common="--precision fp64",
    ),
    pair(
        "handsplit-two", "split over two ranks by hand", "handsplit.py", "", ranks=2, layout="handsplit2.toml"
    ),
    pair(
        "handsplit-four",
        "split over four ranks by hand",
        "handsplit.py",
        "",
        ranks=4,
        layout="handsplit4.toml",
    ),
    pair(
        "handsplit-accumulate",
        "split by hand, three microbatches",
        "handsplit.py",
        "--microbatches 3",
        ranks=2,
        layout="handsplit2.toml",
        common="--steps 5",
    ),
    pair(
        "handsplit-bf16",
        "split by hand, in bf16",
        "handsplit.py",
        "",
        ranks=2,
        layout="handsplit2.toml",
        common="--dtype bfloat16",
    ),
]
