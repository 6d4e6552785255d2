"""Legal pairs of the decoder of ``tests/training/parallel.py``: each layout against one rank or another."""

from __future__ import annotations

from tests.zoo.case import Draw, Legal, Pair, Run

PROGRAM = "../../training/parallel.py"


def pair(
    name: str, story: str, spread: str, ranks: int, *, model: str = "", layout: str = "",
    a: str = "", ranks_a: int = 1,
) -> Legal:  # fmt: skip
    """Return a legal pair of a layout and one rank, or another layout."""

    def make(draw: Draw) -> Pair:
        random = draw.of(PROGRAM)
        drawn = ["--kv-heads", str(random.choice([2, 4])), "--steps", str(random.choice([2, 3, 4]))]
        common = (*drawn, *model.split())
        file = f"../../../training/layouts/{layout}" if layout else ""
        return Pair(
            Run(PROGRAM, ranks_a, (*common, *a.split())),
            Run(PROGRAM, ranks, (*common, *spread.split()), file),
        )

    return Legal(name, story, make)


LEGAL = [
    pair("layout-tp-sp", "tensor and sequence parallel", "--layout tp-sp", 2),
    pair("layout-tp-sp-bf16", "the same in bf16", "--layout tp-sp", 2, model="--precision bf16"),
    pair(
        "layout-pp",
        "a pipeline of seven layers in four microbatches",
        "--layout pp --microbatches 4",
        2,
        model="--depth 7",
    ),
    pair(
        "layout-pp-interleaved",
        "a pipeline of five layers, two stages a rank",
        "--layout pp-interleaved",
        2,
        model="--depth 5",
    ),
    pair("layout-cp", "context parallel by gathering", "--layout cp", 2, layout="cp.toml"),
    pair(
        "layout-cp-zigzag",
        "context parallel, ring, zigzag",
        "--layout cp-ring-zigzag",
        2,
        layout="cp-zigzag.toml",
    ),
    pair("layout-ep", "experts on two ranks", "--layout ep", 2, model="--experts", layout="ep.toml"),
    pair("layout-hsdp", "replicas of shards", "--layout hsdp", 4),
    pair(
        "layout-fsdp1-flat",
        "flat parameters against FSDP2",
        "--layout fsdp1-flat",
        2,
        a="--layout fsdp2",
        ranks_a=2,
    ),
    pair("layout-zero1-fused", "ZeRO-1, two microbatches", "--layout zero1 --microbatches 2", 2),
    pair(
        "layout-fsdp2-tp",
        "FSDP2 and tensor parallel against DDP",
        "--layout fsdp2-tp",
        4,
        a="--layout ddp",
        ranks_a=2,
    ),
    pair(
        "layout-fsdp2-lion", "an optimizer of the program's own", "--layout fsdp2", 2, model="--optimizer own"
    ),
    pair(
        "layout-ddp-scaler",
        "fp16 with a loss scale that overflows first",
        "--layout ddp",
        2,
        model="--precision amp-fp16",
    ),
]
