"""A second set of held-out mistakes: written without knowledge of the detectors, before any diff of them.

Their boundaries and codes were derived from the programs and from the pages of ``docs`` alone.
"""

from __future__ import annotations

from collections.abc import Callable

from tests.zoo.case import At, Bug, Draw, Pair, Planted, Run

SIZES: dict[str, dict[str, list[int]]] = {
    "held2_ctc.py": {"channels": [3, 5, 6], "bands": [8, 10, 14], "width": [12, 16, 20], "letters": [6, 9]},
    "held2_ppo.py": {"features": [4, 5, 7], "actions": [2, 3], "width": [14, 17, 20], "moments": [6, 8]},
    "held2_relative.py": {
        "width": [13, 16, 22], "heads": [2, 3], "part": [4, 5], "vocabulary": [29, 38, 50],
        "length": [8, 9, 11],
    },
    "held2_dino.py": {"features": [6, 8, 9], "width": [13, 18, 21], "prototypes": [7, 11, 14]},
}  # fmt: skip
"""The sizes that are drawn."""


def run(draw: Draw, program: str, ranks: int, *options: str) -> Run:
    return draw.run(program, ranks, SIZES[program], *options)


def bug(
    program: str, plant: str, story: str, code: str, first: At | Callable[[int], At], *, ranks: int = 1,
    ranks_a: int = 0, common: str = "", b: str = "",
) -> Bug:  # fmt: skip
    """Return a mistake; ``first`` may depend on the step from which it acts, ``common`` may name it."""
    name = f"{program.removesuffix('.py').replace('_', '-')}-{plant}"

    def make(draw: Draw) -> Planted:
        since = draw.of(f"{name} since").choice([2, 3])
        shared = [str(since) if part == "SINCE" else part for part in common.split()]
        planted = ["--plant", plant]
        if callable(first) and "--since" not in shared:
            planted += ["--since", str(since)]
        pair = Pair(
            run(draw, program, ranks_a or ranks, *shared),
            run(draw, program, ranks, *shared, *b.split(), *planted),
        )
        return Planted(pair, first(since) if callable(first) else first, code)

    return Bug(name, story, make)


BUGS = [
    bug(
        "held2_ctc.py", "bands-first",
        "maps are flattened with bands before channels (a front end that was converted from channels last)",
        # channels of each band lie beside each other, where those of the reference lie behind one another
        "layout.interleave", At(0, "activation", "front.project", "in.0"),
    ),
    bug(
        "held2_ctc.py", "padding-convolved",
        "padding is not zeroed between two convolutions: the second carries it into the last frames",
        # what the second convolution is given differs in padding, what it gives also before it
        "mask.padding_leak", At(0, "activation", "front.second", "*"), ranks=2,
    ),
    bug(
        "held2_ctc.py", "sample-drawn",
        "the main rank draws the row that it prints, from the generator that dropout draws from",
        # it prints at the end of the step before
        "rng.differs", lambda since: At(since, "activation", "drop", "out"), ranks=2, common="--dropout 0.2",
    ),
    bug(
        "held2_ctc.py", "frames-hidden-anew",
        "checkpointed blocks hide frames that numpy draws, whose generator checkpointing does not restore",
        # the first pass of the first step draws the same; blocks are recomputed with other frames
        "recompute.differs", At(0, "activation", "blocks.*.hide", "out*"), common="--hide", b="--recompute",
    ),
    bug(
        "held2_ppo.py", "ratio-reversed",
        "old over new probability: at first the ratio is 1 either way, and so is the loss what it should be",
        # min(r A, clip(r) A) at r = 1 has the derivative A by the new log-probability, or -A
        "value.sign", At(0, "activation_grad", "PolicyLoss", "in.0"),
    ),
    bug(
        "held2_ppo.py", "kept-in-half",
        "old log-probabilities are kept in float16: an error of 1e-4",
        # no recorded call made the tensor of all parts from which they are taken
        "precision.rounded", At(0, "input", "PolicyLoss", "in.1"), ranks=2,
    ),
    bug(
        "held2_ppo.py", "critic-unwrapped",
        "only the actor is wrapped for the ranks: each rank's critic goes its own way",
        # as where a parameter was added after wrapping: it is clipped as each rank's own
        "reduction.missing", At(0, "clipped_grad", "Critic.*", "before"), ranks=2, ranks_a=1,
    ),
    bug(
        "held2_ppo.py", "limit-kept",
        "the limit of the clip is not lowered when it should be",
        "clip.wrong_norm", lambda since: At(since, "clipped_grad", "(clip)", "max_norm"), ranks=2,
        common="--narrow --since SINCE",
    ),
    bug(
        "held2_relative.py", "not-shifted",
        "the decoder is given its labels as they are, and sees what it should tell",
        "layout.shifted", At(0, "activation", "shared", "in.0"), common="--microbatches 2",
    ),
    bug(
        "held2_relative.py", "untied",
        "pretrained weights are assigned under both names of a tied weight, which are two from then on",
        # both hold one value at first; each has the gradient of its own use
        "tied.not_summed", At(0, "local_grad", "*.weight", "grad"),
    ),
    bug(
        "held2_relative.py", "scheduled-by-each-rank",
        "a wrapper that steps the scheduler once for each rank (accelerate's, where batches are not split)",
        "schedule.position", At(1, "schedule", "scheduler.0", "position"), ranks=2,
    ),
    bug(
        "held2_relative.py", "items-of-the-source",
        "the number of items is that of the source's tokens, where the loss counts labels",
        # all weights of a step have one factor, another in each step
        "scale.other", At(0, "loss", "cross_entropy", "weight"), ranks=2, common="--microbatches 2",
    ),
    bug(
        "held2_relative.py", "written-before-the-schedule",
        "a checkpoint is written before the scheduler's step: its learning rate is that of the step before",
        # the scheduler stands where it should
        "optimizer.hyperparameter", lambda since: At(since, "schedule", "optimizer.0.group.*", "lr"),
        common="--read-back --since SINCE",
    ),
    bug(
        "held2_dino.py", "centre-of-own-rows",
        "the running mean that centres answers is each rank's own (a buffer that nothing reduces)",
        "replica.disagrees", At(0, "buffer", "CentredLoss.center", "model"), ranks=2,
    ),
    bug(
        "held2_dino.py", "teacher-of-the-main-rank",
        "from some step on only the main rank moves its teacher, as averages that are only saved may be",
        # a copy of the model is recorded in the windows that move it; the next one is the first to use it
        "replica.disagrees", lambda since: At(since, "buffer", "Network.*", "model"), ranks=2,
    ),
]  # fmt: skip
