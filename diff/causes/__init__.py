"""Names the cause of the first origin: detectors propose, one shared function tests."""

from __future__ import annotations

from tensortrace.diff.assemble import NotComparable
from tensortrace.diff.catalog import Catalog
from tensortrace.diff.causes import (
    arrangement,
    between,
    bias,
    boundary,
    clip,
    copied,
    coupled,
    drawing,
    formula,
    hooked,
    init,
    inputs,
    mixups,
    optimizer,
    order,
    padding,
    parted,
    ragged,
    recompute,
    reduction,
    routing,
    scale,
    schedule,
    skipping,
    tied,
    values,
    vocabulary,
)
from tensortrace.diff.causes.case import Case, Detector, settle
from tensortrace.diff.causes.ranking import Accepted, ranked
from tensortrace.diff.execute import Execution
from tensortrace.diff.logical import Unplaceable
from tensortrace.diff.outcome import Outcome
from tensortrace.diff.result import Cause
from tensortrace.diff.window import Windows
from tensortrace.tracer.errors import NotKept

DETECTORS: tuple[Detector, ...] = (
    skipping.skipped_by_scaler,
    skipping.skipped_by_program,
    skipping.skipped_by_stage,
    recompute.differs,
    coupled.by_batch,
    coupled.other_mode,
    drawing.other_mask,
    inputs.different_rows,
    inputs.given_otherwise,
    inputs.different_targets,
    inputs.padding_counted,
    inputs.padding_weighed,
    padding.pooled,
    padding.attended,
    padding.unmasked,
    vocabulary.in_the_loss,
    vocabulary.in_a_module,
    vocabulary.in_the_scores,
    vocabulary.trained,
    init.init_differs,
    routing.of_another,
    arrangement.permuted,
    arrangement.transposed,
    arrangement.shifted,
    arrangement.positions,
    ragged.transposed,
    ragged.shifted,
    bias.duplicated,
    optimizer.lost_moment,
    optimizer.param_frozen,
    optimizer.step_counter,
    mixups.swapped_state,
    mixups.weight_decay_mode,
    formula.other_decay,
    formula.other_numbers,
    formula.other_count,
    formula.other_rate,
    mixups.stale,
    reduction.not_zeroed,
    order.other_order,
    reduction.missing,
    parted.not_added,
    reduction.double,
    reduction.early,
    between.not_added_up,
    tied.apart,
    between.wrong_group,
    between.reduce_dtype,
    reduction.dropped_microbatch,
    reduction.replica_disagrees,
    values.nonfinite,
    values.zero,
    values.sign,
    values.offset,
    values.rounded,
    values.not_updated,
    copied.in_part,
    copied.from_another_place,
    scale.token_ratio,
    scale.common_factor,
    scale.of_some_parts,
    hooked.on_some,
    schedule.position,
    schedule.hyperparameter,
    schedule.param_missing,
    clip.before_accumulation,
    clip.skipped,
    clip.after_the_update,
    clip.not_applied,
    clip.left_out,
    clip.wrong_norm,
    clip.total_norm,
    clip.of_some_gradients,
    clip.own_part_by_hand,
    parted.clipped_alone,
    clip.before_unscale,
    boundary.missing,
)
"""All detectors; a new cause is one function in a file of its family and one line here."""


def name_causes(
    origin: Outcome, execution: Execution, a: Catalog, b: Catalog, offset: int
) -> tuple[tuple[Cause, ...], tuple[str, ...]]:
    """Return the tested causes of an origin, the best first, and notes of detectors that failed.

    The verdict stands without a cause: a detector that fails is told, and costs its own proposals only.
    """
    siblings = tuple(o for o in execution.outcomes if _beside(o, origin))
    siblings = siblings if any(o is origin for o in siblings) else (origin,)
    windows = Windows.of((origin, *siblings))  # what is too large to hold is looked at in one block
    seen = {id(o): windows.outcome(o) for o in (origin, *siblings)}
    case = Case(seen[id(origin)], tuple(seen[id(o)] for o in siblings), execution, a, b, offset)
    accepted: list[Accepted] = []
    notes = []
    for number, detector in enumerate(DETECTORS):
        try:
            tested = [
                Accepted(cause, proposal.simplicity, proposal.fitted, number)
                for proposal in detector(case)
                if (cause := settle(case, proposal))
            ]
        except (NotComparable, Unplaceable, NotKept):
            continue  # it looks at tensors of which no layout is known, or no values were stored
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            what = getattr(detector, "__qualname__", str(detector))
            told = f"{type(error).__name__}: {error}"
            notes.append(f"the search for a cause failed in {what} ({told}): please report it")
            continue
        accepted += tested
    return ranked(accepted, case), tuple(notes)


def _beside(outcome: Outcome, origin: Outcome) -> bool:
    """Tell whether an outcome is an origin, or a further one like it, of the same step, kind and slot."""
    same = outcome.node.step == origin.node.step and outcome.node.microbatch == origin.node.microbatch
    mine, other = outcome.node.slot, origin.node.slot
    return same and outcome.role == origin.role and (mine.kind, mine.slot) == (other.kind, other.slot)
