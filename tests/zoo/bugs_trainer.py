"""Mistakes planted in ``programs/trainer.py``: one rank and data parallel.

Each ``first`` is derived from what the mistake does: the first thing that it makes other than in the
reference, in the order of the ladder. Where both sides are spread alike, that is the stage that errs; where
the reference is one rank, which neither averages nor divides, gradients meet when the update consumes them.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tests.zoo.case import At, Bug, Draw, Pair, Planted, Run

PROGRAM = "trainer.py"


def sizes(draw: Draw, what: str = "") -> list[str]:
    """Return options for a drawn model and batch: 8 rows, so that ranks and microbatches share evenly."""
    random = draw.of(f"trainer {what}".strip())
    heads = random.choice([2, 3, 4])
    width = heads * random.choice([4, 6, 8])
    return [
        "--seed", str(random.randrange(1000)),
        "--heads", str(heads),
        "--width", str(width),
        "--depth", str(random.choice([2, 3])),
        "--hidden", str(random.choice([n for n in (13, 19, 27, 35) if n != width])),
        "--vocabulary", str(random.choice([37, 50, 64, 71])),
        "--length", str(random.choice([9, 11, 14])),
    ]  # fmt: skip


def block(draw: Draw, name: str) -> int:
    """Return the block in which the mistake of this name is planted."""
    return draw.of(name).choice([0, 1])


def since(draw: Draw, name: str) -> int:
    """Return the step from which the mistake of this name acts."""
    return draw.of(f"{name} since").choice([1, 2])


def trainer(draw: Draw, ranks: int, *options: str, what: str = "") -> Run:
    return Run(PROGRAM, ranks, (*sizes(draw, what), *options))


FirstOf = Callable[[int, int], At]
"""Where a mistake acts first, given its block and the step from which it acts."""


def bug(
    name: str, story: str, code: str, first: At | FirstOf, *, plant: str = "", common: str = "", a: int = 1,
    b: int = 1, b_only: str = "", steps: int = 3,
) -> Bug:  # fmt: skip
    """Return a mistake: ``a`` and ``b`` ranks train with ``common`` options, b with its own and the plant."""

    def make(draw: Draw) -> Planted:
        where, when = block(draw, name), since(draw, name)
        shared = (*common.split(), "--steps", str(steps))
        planted = ("--plant", plant or name, "--at", str(where), "--since", str(when))
        pair = Pair(trainer(draw, a, *shared), trainer(draw, b, *shared, *b_only.split(), *planted))
        return Planted(pair, first(where, when) if callable(first) else first, code)

    return Bug(name, story, make)


def inside(name: str, kind: str, slot: str) -> FirstOf:
    """Return a first boundary at step 0 within the block where the mistake is planted."""
    return lambda at, since: At(0, kind, f"blocks.{at}.{name}", slot)


def later(kind: str, name: str, slot: str) -> FirstOf:
    """Return a first boundary at the step from which the mistake acts; ``{at}`` in the name is the block."""
    return lambda at, since: At(since, kind, name.format(at=at), slot)


SCALE = [
    bug(
        "accumulated-means",
        "the mean of each microbatch's mean, of unequal numbers of tokens (transformers#34191)",
        # each token weighs 1 / (its microbatch's tokens x microbatches): the loss itself weighs them so
        "scale.token_ratio", At(0, "loss", "cross_entropy", "weight"),
        plant="means-of-means", common="--accumulate 4",
    ),
    bug(
        "ranks-means",
        "each rank divides by its own tokens, DDP averages the ranks",
        "scale.token_ratio", At(0, "loss", "cross_entropy", "weight"),
        plant="means-of-means", b=2,
    ),
    bug(
        "no-world-factor",
        "the loss is divided by all ranks' tokens, and FSDP divides by the ranks again",
        # both are FSDP2: the stage that errs is the loss
        "scale.world_size", At(0, "loss", "cross_entropy", "weight"),
        a=2, b=2, common="--spread fsdp2",
    ),
    bug(
        "divided-again",
        "the trainer divides by the accumulation steps what the script has normalised (transformers#35203)",
        "scale.accumulation", At(0, "loss", "cross_entropy", "weight"), common="--accumulate 4",
    ),
    bug(
        "scale-left-in",
        "optimizer.step() in the place of scaler.step(optimizer): nobody unscales",
        # what b does not unscale counts as unscaled, and meets what a has unscaled
        "scale.loss_scale", At(0, "unscaled_grad", "*", "grad"), common="--scale 1024 --no-clip",
    ),
    bug(
        "three-percent",
        "an objective that a regulariser's factor makes 3 % larger",
        "scale.other", At(0, "loss", "cross_entropy", "weight"),
        plant="label-smoothing-scale", a=2, b=2, common="--spread hsdp",
    ),
    bug(
        "sum-for-mean",
        "gradients are summed over the ranks that should average them (torchtitan#2318: norm off by 8)",
        # the reference is one rank; b's own reduction is what has no like
        "scale.world_size", At(0, "reduced_grad", "*", "grad"), b=2, b_only="--spread fsdp2",
    ),
]  # fmt: skip


def rounded(draw: Draw) -> Planted:
    """Return a factor that float16 rounds by 1e-4 to 5e-4 of itself: 1 / (8 rows of a drawn length)."""
    exact = {n: 1 / (8 * n) for n in range(9, 16)}
    error = {n: abs(float(np.float16(value)) / value - 1) for n, value in exact.items()}
    length = draw.of("rounded").choice([n for n, off in error.items() if 1e-4 < off < 5e-4])
    common = ("--even", "--length", str(length))
    pair = Pair(trainer(draw, 1, *common), trainer(draw, 1, *common, "--plant", "factor-in-half"))
    return Planted(pair, At(0, "loss", "cross_entropy", "weight"), "scale.other")


REDUCTION = [
    bug(
        "added-after-wrapping",
        "a parameter that DDP does not know, because it was added after the model was wrapped",
        # neither run reduces it; the optimizer of each rank is given its own gradient
        "reduction.missing", inside("mlp_norm.weight", "clipped_grad", "before"), b=2,
    ),
    bug(
        "norm-ignored",
        "the last norm is left out of FSDP, and nobody averages its gradient",
        "reduction.missing", At(0, "clipped_grad", "norm.*", "before"), b=2, b_only="--spread fsdp1",
    ),
    bug(
        "reduced-again",
        "gradients that DDP has averaged are summed over the ranks once more",
        "reduction.double", At(0, "reduced_grad", "*", "grad"), a=2, b=2,
    ),
    bug(
        "replicas-forgotten",
        "parameters are sharded over the inner axis of the mesh alone: replicas are not averaged",
        # the reduction is there, and over pairs of the four ranks
        "reduction.wrong_group", At(0, "reduced_grad", "*", "grad"), b=4, b_only="--spread hsdp",
    ),
    bug(
        "silent-at-the-last",
        "no_sync around the last microbatch instead of the others",
        "reduction.early", At(0, "reduced_grad", "*", "grad"), a=2, b=2, common="--accumulate 2",
    ),
    bug(
        "reduced-in-fp16",
        "a communication hook compresses gradients to float16",
        "precision.reduce_dtype", At(0, "reduced_grad", "*", "grad"), b=2,
    ),
    bug(
        "reduced-in-bf16",
        "FSDP2's mixed precision reduces in bfloat16 (DeepSpeed and FSDP defaults that differ)",
        "precision.reduce_dtype", At(0, "reduced_grad", "*", "grad"),
        b=2, b_only="--spread fsdp2",
    ),
    bug(
        "zeroed-in-the-loop",
        "zero_grad inside the loop over microbatches: DDP averages the last one alone",
        "grad.dropped_microbatch", At(0, "reduced_grad", "*", "grad"), a=2, b=2, common="--accumulate 2",
    ),
    bug(
        "never-zeroed",
        "zero_grad is left out from some step on; the next window opens with what was consumed",
        "grad.not_zeroed", lambda at, since: At(since + 1, "local_grad", "*", "start"), steps=4,
    ),
    bug(
        "never-zeroed-fsdp",
        "the same on two ranks of FSDP1",
        "grad.not_zeroed", lambda at, since: At(since + 1, "local_grad", "*", "start"),
        plant="never-zeroed", steps=4, b=2, b_only="--spread fsdp1",
    ),
]  # fmt: skip

CLIP = [
    bug(
        "clipped-in-the-loop",
        "clip_grad_norm_ inside the loop over microbatches",
        "clip.before_accumulation", At(0, "clipped_grad", "(clip)", "total_norm"), common="--accumulate 2",
    ),
    bug(
        "clip-off",
        "a maximal norm of 0 that means no clipping in one framework, from some step on",
        "clip.skipped", later("clipped_grad", "(clip)", "total_norm"), b=2, b_only="--spread fsdp2",
    ),
    bug(
        "clip-by-largest",
        "the norm's kind is infinity in one program and 2 in the other",
        # the kind is what the total norm is computed by
        "clip.wrong_norm", At(0, "clipped_grad", "(clip)", "norm_type"),
    ),
    bug(
        "clip-own-shard",
        "torch.nn.utils.clip_grad_norm_ on FSDP1's shards: each rank clips by the norm of its own",
        "clip.local_norm", At(0, "clipped_grad", "(clip)", "total_norm"), b=2, b_only="--spread fsdp1",
    ),
    bug(
        "clipped-before-unscaling",
        "gradients are clipped while they carry the loss scale (PyTorch's AMP examples warn of it)",
        "clip.before_unscale", At(0, "clipped_grad", "(clip)", "total_norm"), common="--scale 1024",
    ),
]  # fmt: skip

UPDATE = [
    bug(
        "norms-decay",
        "weight decay acts on norms and biases, too",
        "optimizer.hyperparameter", At(0, "schedule", "optimizer.0.group.*", "weight_decay"),
    ),
    bug(
        "betas-swapped",
        "the betas of Adam are given in the wrong order",
        "optimizer.hyperparameter", At(0, "schedule", "optimizer.0.group.*", "betas.0"),
        b=2, b_only="--spread fsdp2",
    ),
    bug(
        "adam-for-adamw",
        "Adam's weight decay is added to the gradient, where AdamW's acts on the weight",
        # torch says which of them it is among the values of a group, which the update reads first
        "optimizer.weight_decay_mode", At(0, "schedule", "optimizer.0.group.0", "decoupled_weight_decay"),
    ),
    bug(
        "made-before-the-head",
        "the optimizer was made before the head was added",
        "optimizer.param_missing", At(0, "schedule", "optimizer.0.group.*", "members"), b=2,
    ),
    bug(
        "gradient-dropped",
        "a callback that freezes a norm by taking its gradient away, from some step on",
        # the gradient is computed as ever; Adam passes over the parameter, its step counter first
        "optimizer.param_frozen", later("optimizer_state", "blocks.{at}.mlp_norm.weight", "step"),
    ),
    bug(
        "written-to-a-copy",
        "an update that goes to a copy: the weight is afterwards what it was",
        # the optimizer's own step is as ever: what the next step starts from is not what it left
        "value.not_updated",
        lambda at, since: At(since + 1, "param", f"blocks.{at}.mlp.down.weight", "start"), steps=4,
    ),
    bug(
        "scheduled-in-the-loop",
        "the scheduler is stepped once a microbatch",
        "schedule.position", At(0, "schedule", "scheduler.0", "position"), common="--accumulate 2",
    ),
    bug(
        "not-broadcast",
        "a sharded optimizer whose owner does not send one weight to the others (ZeRO-1)",
        "replica.disagrees", inside("mlp.up.weight", "param", "model"), b=2, b_only="--spread zero1",
    ),
    bug(
        "rank-skips",
        "a rank that sees no finite loss goes on to the next batch without an update",
        "step.skipped_on_some_ranks", later("input", "(root)", "rows"), b=2, steps=4,
    ),
    bug(
        "moments-lost",
        "the first moments are not in the checkpoint",
        "optimizer.lost_moment", At("init", "optimizer_state", "*", "exp_avg"), common="--resume",
    ),
    bug(
        "step-not-saved",
        "the count of updates restarts at 0 on resume, and with it the bias correction",
        "optimizer.step_counter", At("init", "optimizer_state", "*", "step"), common="--resume", b=2,
    ),
    bug(
        "state-by-number",
        "optimizer state saved by number and loaded where gate and up are in another order",
        "optimizer.swapped_state",
        lambda at, since: At("init", "optimizer_state", f"blocks.{at}.mlp.*.weight", "exp_avg*"),
        common="--resume",
    ),
]  # fmt: skip

INPUT = [
    bug(
        "epoch-not-set",
        "set_epoch is not called: the second epoch has the first one's order",
        "input.order", At(2, "input", "(root)", "in.0"), a=2, b=2, steps=4,
    ),
    bug(
        "sampler-forgotten",
        "no distributed sampler: every rank reads the rows of rank 0",
        "input.duplicated_across_ranks", later("input", "(root)", "in.0"), b=2,
    ),
    bug(
        "truncated-shorter",
        "another tokenizer's limit cuts long rows, from some step on",
        "input.different", later("input", "(root)", "in.0"),
    ),
    bug(
        "labels-shifted-twice",
        "the collator shifts labels that the loss expects shifted once (HF's models shift within)",
        # rows are told by their tokens, which are right
        "input.different", later("loss", "cross_entropy", "target"),
    ),
    bug(
        "padding-trained",
        "the labels are padded with a token, and ignore_index is the default",
        "mask.padding_leak", At(0, "loss", "cross_entropy", "count"), b=2,
    ),
]  # fmt: skip

INIT = [
    bug(
        "own-weights",
        "ranks seed with their number before FSDP2 shards, which does not broadcast",
        "init.differs", At("init", "param", "*", "model"), b=2, b_only="--spread fsdp2",
    ),
    bug(
        "qkv-by-head",
        "a fused weight stored head by head is read as queries, keys, values (HF to Megatron)",
        "layout.interleave",
        lambda at, since: At("init", "param", f"blocks.{at}.attention.qkv.weight", "model"),
    ),
    bug(
        "query-key-swapped",
        "a conversion puts keys where queries belong",
        "layout.permuted_blocks",
        lambda at, since: At("init", "param", f"blocks.{at}.attention.qkv.weight", "model"),
        b=2, b_only="--spread fsdp1",
    ),
    bug(
        "saved-in-bf16",
        "a weight that the checkpoint holds in bfloat16",
        "precision.rounded",
        lambda at, since: At("init", "param", f"blocks.{at}.attention.qkv.weight", "model"),
    ),
]  # fmt: skip

FORWARD = [
    bug(
        "heads-not-moved",
        "heads are flattened without moving them behind the positions",
        "layout.transposed", inside("attention.out", "activation", "in.0"),
    ),
    bug(
        "shifted-twice",
        "a token shift that the caller has already made",
        "layout.shifted", At(0, "activation", "shift", "out"), b=2,
    ),
    bug(
        "rotary-in-bf16",
        "cosines and sines are kept in bfloat16 (a cast of the whole model takes the buffers along)",
        "precision.rounded", At(0, "activation", "rotary", "out*"), b=2, b_only="--spread fsdp2",
    ),
    bug(
        "rotary-in-fp16",
        "the same in float16: an error of 1e-4",
        "precision.rounded", At(0, "activation", "rotary", "out*"),
    ),
    bug(
        "path-mask-inverted",
        "stochastic depth keeps what it should drop: at rate 0 nothing is left of the branch",
        "value.zero", inside("drop_path", "activation", "out"), b=2,
    ),
    bug(
        "cache-not-cleared",
        "a cached embedding of the row's length is that of the first batch",
        "value.stale", At(1, "activation", "sizes", "out"),
    ),
    bug(
        "one-element",
        "one element of an MLP's output is off by 1e-4 of itself",
        "unexplained", inside("mlp", "activation", "out"),
    ),
    bug(
        "norm-not-called",
        "a block that does not call one of its norms",
        # what the norm is given is in one run only, before what the MLP is given differs
        "boundary.missing", inside("mlp_norm", "activation", "*"),
    ),
]  # fmt: skip

RANDOM = [
    bug(
        "seeded-alike",
        "all ranks draw the same dropout masks",
        "rng.same_on_all_ranks", At(0, "activation", "dropout", "out"), a=2, b=2, common="--dropout 0.2",
    ),
    bug(
        "draws-before-dropout",
        "a metric draws a number in the middle of the forward pass",
        # the generators stand alike until then
        "dropout.mask", inside("mlp.dropout", "activation", "out"), common="--dropout 0.2",
    ),
    bug(
        "generator-not-restored",
        "a resumed run seeds anew instead of restoring the generator",
        "rng.differs", At(0, "activation", "dropout", "out"), common="--dropout 0.2 --resume",
    ),
    bug(
        "recomputed-anew",
        "activation checkpointing without the generator's state: other masks when backward recomputes",
        # each block's region is recomputed with other masks; before that all agrees
        "recompute.differs", At(0, "activation", "blocks.*.mlp.dropout", "out*"),
        common="--dropout 0.2 --checkpoint",
    ),
    bug(
        "left-in-eval",
        "model.eval() for the held-out loss, and no model.train() after it",
        "mode.training", later("activation", "dropout", "out"), common="--dropout 0.2",
    ),
]  # fmt: skip

ROUNDED = Bug("factor-in-half", "the objective's factor is kept in float16: off by 1e-4", rounded)

BUGS = [*SCALE, ROUNDED, *REDUCTION, *CLIP, *UPDATE, *INPUT, *INIT, *FORWARD, *RANDOM]
