"""The trainings of the layout table and of its planted mistakes.

Sizes that no mesh divides are everywhere: MLPs of 13 features, a vocabulary of 50, rows of 3 to 11 tokens;
pipelines have 7, 5 or 3 layers.
"""

from __future__ import annotations

from tests.integration.layouts import Case

DEEP = "--depth 7"
TIED = "--depth 3 --tied"

QUICK = [
    Case("ddp", 2, spread="--layout ddp"),
    Case("ddp-contiguous", 2, spread="--layout ddp --sampler contiguous"),
    Case("ddp-repeated", 2, "--repeat-rows", "--layout ddp"),
    Case("ddp-split", 2, spread="--layout ddp --microbatches 2"),
    Case("ddp-batch-norm", 2, "--batch-norm", "--layout ddp"),
    Case("fsdp2", 2, spread="--layout fsdp2"),
    Case("fsdp2-split", 2, spread="--layout fsdp2 --microbatches 2"),
    Case("fsdp1", 2, spread="--layout fsdp1"),
    Case("fsdp1-flat", 2, spread="--layout fsdp1-flat"),
    Case("hsdp", 2, spread="--layout hsdp"),
    Case("zero1", 2, spread="--layout zero1"),
    Case("tp", 2, spread="--layout tp"),
    Case("tp-shared-kv", 2, "--kv-heads 1", "--layout tp"),
    Case("tp-padded", 2, spread="--layout tp --pad-vocabulary 64", layout="tp-padded"),
    Case("tp-sp", 2, spread="--layout tp-sp"),
    Case("pp", 2, DEEP, "--layout pp"),
    Case("pp-tied", 2, TIED, "--layout pp", layout="pp-tied"),
    Case("pp-interleaved", 2, "--depth 5", "--layout pp-interleaved"),
    Case("cp", 2, spread="--layout cp", layout="cp"),
    Case("cp-zigzag", 2, spread="--layout cp-zigzag", layout="cp-zigzag"),
    Case("cp-ring", 2, spread="--layout cp-ring-zigzag", layout="cp-zigzag"),
    Case("ep", 2, "--experts", "--layout ep", layout="ep"),
]

WIDE = [
    Case("ddp.4", 4, spread="--layout ddp"),
    Case("fsdp2.4", 4, spread="--layout fsdp2"),
    Case("fsdp1.4", 4, spread="--layout fsdp1"),
    Case("hsdp.4", 4, spread="--layout hsdp"),
    Case("zero1.4", 4, spread="--layout zero1"),
    Case("tp.4", 4, spread="--layout tp"),
    Case("tp-sp.4", 4, spread="--layout tp-sp"),
    Case("fsdp2-tp", 4, spread="--layout fsdp2-tp"),
    Case("pp.4", 4, DEEP, "--layout pp"),
    Case("cp-zigzag.4", 4, spread="--layout cp-zigzag", layout="cp-zigzag"),
    Case("ep.4", 4, "--experts", "--layout ep", layout="ep"),
    Case("dp-tp-pp", 8, DEEP, "--layout dp-tp-pp"),
]

CASES = QUICK + WIDE

PLANTS = [
    Case("ddp-no-sync", 2, spread="--layout ddp", plant="no-sync-left-on"),
    Case("fsdp2-sum", 2, spread="--layout fsdp2", plant="sum-for-mean"),
    Case("fsdp1-ignored", 2, spread="--layout fsdp1", plant="norm-ignored"),
    Case("hsdp-replicas", 2, spread="--layout hsdp", plant="replicas-forgotten"),
    Case("zero1-stale", 2, spread="--layout zero1", plant="not-broadcast"),
    Case("tp-swapped", 2, spread="--layout tp", plant="kv-blocks-swapped"),
    Case("tp-exchanged", 2, spread="--layout tp", plant="gate-up-exchanged"),
    Case("tp-bias", 2, spread="--layout tp", plant="bias-on-every-rank"),
    Case("tp-kv", 2, "--kv-heads 1", "--layout tp", plant="kv-not-summed"),
    Case("tp-sp-norms", 2, spread="--layout tp-sp", plant="norm-grads-not-reduced"),
    Case("pp-tied-apart", 2, TIED, "--layout pp", plant="tied-not-summed", layout="pp-tied"),
    Case("cp-positions", 2, spread="--layout cp", plant="local-positions", layout="cp"),
    Case("cp-kv", 2, spread="--layout cp", plant="kv-grads-not-summed", layout="cp"),
    Case("ep-tokens", 2, "--experts", "--layout ep", plant="outputs-to-wrong-tokens", layout="ep"),
    Case("fsdp2-tp-bias", 4, spread="--layout fsdp2-tp", plant="bias-on-every-rank"),
    Case("dp-tp-pp-bias", 8, DEEP, "--layout dp-tp-pp", plant="bias-on-every-rank"),
]
