"""Held-out mistakes: written after the diff's detectors and constants were frozen, before any diff of them.

Their boundaries and codes were derived from the programs and from ``docs/causes.md`` alone.
"""

from __future__ import annotations

from collections.abc import Callable

from tests.zoo.case import At, Bug, Draw, Pair, Planted, Run

SIZES: dict[str, dict[str, list[int]]] = {
    "held_vit.py": {"heads": [1, 2, 4], "width": [12, 16, 20], "patch": [2, 3], "classes": [5, 6, 9]},
    "held_towers.py": {"features": [9, 11], "width": [14, 18, 22], "vocabulary": [30, 37, 50]},
    "held_dpo.py": {"width": [14, 18, 23], "vocabulary": [30, 41], "prompt": [4, 5], "answer": [6, 7]},
    "held_gru.py": {"width": [13, 15, 22], "vocabulary": [29, 34, 45], "length": [7, 9, 10]},
    "held_denoise.py": {"features": [6, 7, 11], "width": [19, 24, 30]},
}
"""The sizes that are drawn."""


def run(draw: Draw, program: str, ranks: int, *options: str) -> Run:
    return draw.run(program, ranks, SIZES[program], *options)


def bug(
    program: str, plant: str, story: str, code: str, first: Callable[[int], At], *, ranks: int = 1,
    ranks_a: int = 1, common: tuple[str, ...] = (),
) -> Bug:  # fmt: skip
    """Return a mistake; ``first`` is given the step from which it acts, where the program asks for one."""
    name = f"{program.removesuffix('.py').replace('_', '-')}-{plant}"

    def make(draw: Draw) -> Planted:
        since = draw.of(f"{name} since").choice([2, 3])
        planted = ["--plant", plant]
        if plant in ("restored-too-old", "unit-half"):
            planted += ["--since", str(since)]
        pair = Pair(run(draw, program, ranks_a, *common), run(draw, program, ranks, *common, *planted))
        return Planted(pair, first(since), code)

    return Bug(name, story, make)


BUGS = [
    bug(
        "held_vit.py", "patches-reshaped",
        "feature maps are reshaped to tokens, where they must be flattened and transposed",
        "layout.transposed", lambda since: At(0, "activation", "patches", "out"),
    ),
    bug(
        "held_vit.py", "loss-summed",
        "the loss is summed over ranks for the log, by a sum that gradients flow through; DDP averages",
        # the reference is one rank, so that weight and reduction have no like apart: the factor shows where
        # they are together. (Derived at first as the loss's weight, as it is in runs of one scheme.)
        "scale.world_size", lambda since: At(0, "reduced_grad", "*", "grad"), ranks=2,
    ),
    bug(
        "held_vit.py", "restored-too-old",
        "after an evaluation with averaged weights, those kept from before the update are put back",
        # the update itself is right; what the next window begins with is what it was before
        "value.not_updated", lambda since: At(since, "param", "*", "start"), common=("--evaluate",),
    ),
    bug(
        "held_towers.py", "temperature-unlisted",
        "groups of matrices (ndim 2 and more) and vectors (ndim 1): a scalar belongs to neither",
        "optimizer.param_missing", lambda since: At(0, "schedule", "optimizer.0.group.*", "members"),
    ),
    bug(
        "held_towers.py", "one-zeroed",
        "two optimizers, of which one alone zeroes its gradients",
        "grad.not_zeroed", lambda since: At(1, "local_grad", "text.*", "start"), common=("--two-optimizers",),
    ),
    bug(
        "held_towers.py", "labels-local",
        "with gathered negatives, a rank's labels begin at 0 instead of behind the other ranks' rows",
        # scores agree; rank 1's targets are other columns
        "input.different", lambda since: At(0, "loss", "cross_entropy", "target"), ranks=2, ranks_a=2,
    ),
    bug(
        "held_towers.py", "unit-half",
        "unit vectors are rounded to float16 from some step on: an error of 1e-4",
        "precision.rounded", lambda since: At(since, "activation", "unit", "out"), ranks=2,
    ),
    bug(
        "held_dpo.py", "margin-reversed",
        "chosen and rejected change places; at first both margins cancel, and the loss is log 2 either way",
        "value.sign", lambda since: At(0, "activation", "Margin", "out"),
    ),
    bug(
        "held_dpo.py", "positions-of-padding",
        "positions of prompts that are padded at the left count the padding",
        # in the policy and in the frozen reference alike, and both are given the rows
        "position.shifted", lambda since: At(0, "activation", "*position", "in.0"), ranks=2,
    ),
    bug(
        "held_dpo.py", "padding-summed",
        "a row's log-probability is summed over prompt and padding, too",
        # in the policy and in the frozen reference alike
        "mask.padding_leak", lambda since: At(0, "activation", "*total", "out"),
    ),
    bug(
        "held_dpo.py", "reference-trains",
        "the frozen reference is left in training mode, and its dropout drops",
        # the policy is called first, and draws the same masks in step 0
        "mode.training", lambda since: At(0, "activation", "*drop", "out"), common=("--dropout", "0.2"),
    ),
    bug(
        "held_gru.py", "schedule-in-microbatches",
        "the length of the schedule is counted in microbatches: the decay behind the warm-up is too slow",
        # rates of steps 0, 1 and 2 are 1/3, 2/3 and 1 either way
        "optimizer.hyperparameter", lambda since: At(3, "schedule", "optimizer.0.group.*", "lr"),
        common=("--microbatches", "2"),
    ),
    bug(
        "held_gru.py", "first-tokens-counted",
        "the number of tokens is taken before labels are shifted: each row's first counts as a target",
        # one rank against two; no sum or mean over ranks makes such a factor
        "scale.other", lambda since: At(0, "loss", "cross_entropy", "weight"), ranks=2,
        common=("--microbatches", "2"),
    ),
    bug(
        "held_denoise.py", "noise-by-local-row",
        "noise is drawn by a row's number on its rank: other ranks' rows get rank 0's noise",
        "input.different", lambda since: At(0, "input", "(root)", "in.*"), ranks=2,
    ),
    bug(
        "held_denoise.py", "last-batch-uneven",
        "a mean of the ranks' means is right until the last batch, which ranks share unevenly",
        # four steps; the last has five rows
        "scale.token_ratio", lambda since: At(3, "loss", "mse_loss", "weight"), ranks=2,
    ),
]  # fmt: skip
