"""Which kinds of boundaries belong together."""

from __future__ import annotations

from tensortrace.tracer.types import Kind

RUNGS = frozenset({Kind.REDUCED_GRAD, Kind.UNSCALED_GRAD, Kind.CLIPPED_GRAD})
"""What is made of a parameter's local gradients, until an optimizer consumes it."""

GRADIENTS = RUNGS | {Kind.ACTIVATION_GRAD, Kind.LOCAL_GRAD}
"""Kinds that the scale of the loss multiplies, and in which a loss scale can overflow."""

PASSES = frozenset({Kind.ACTIVATION, Kind.LOSS, Kind.ACTIVATION_GRAD, Kind.LOCAL_GRAD})
"""What the modules' forward and backward passes compute."""

STATES = frozenset({Kind.PARAM, Kind.OPTIMIZER_STATE, Kind.BUFFER})
"""What one step leaves to the next."""
