"""Tells the clock which chunk of a pipeline schedule runs, and names the stages it runs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

from tensortrace.tracer.hooks import guard
from tensortrace.tracer.hooks.imports import when_imported
from tensortrace.tracer.hooks.reductions import Reductions
from tensortrace.tracer.hooks.session import Session, StageBackward
from tensortrace.tracer.placements import pipelining

Method = Callable[..., Any]


class Pipelines:
    """Watches schedules and stages of ``torch.distributed.pipelining``, once the program imports it."""

    def __init__(self, session: Session, reductions: Reductions) -> None:
        self._session = session
        self._reductions = reductions

    def install(self) -> None:
        """Replace methods of both as soon as their modules exist."""
        when_imported(self._session.patches, pipelining.SCHEDULES, self._watch_schedules)
        when_imported(self._session.patches, pipelining.STAGES, self._watch_stages)

    def _watch_schedules(self, module: ModuleType) -> None:
        for owner in pipelining.schedule_classes(module):
            self._replace(owner, "step", self._run)
            for name in pipelining.rehearsals(owner):
                self._replace(owner, name, guard.hide)  # run to learn shapes, and not part of the training

    def _watch_stages(self, module: ModuleType) -> None:
        owner = pipelining.stage_class(module)
        if owner is not None:
            self._replace(owner, pipelining.FORWARD, self._forward)
            self._replace(owner, pipelining.BACKWARD, self._backward)
            self._replace(owner, pipelining.BACKWARD_WEIGHT, self._backward_weight)
            self._replace(owner, pipelining.SCALE, self._scale)
            if hasattr(owner, pipelining.REDUCE):
                self._replace(owner, pipelining.REDUCE, self._reduce)

    def _replace(self, owner: type, name: str, around: Callable[[Method], Method]) -> None:
        self._session.patches.attribute(owner, name, around(getattr(owner, name)))

    def _run(self, original: Method) -> Method:
        @functools.wraps(original)
        def step(schedule: object, *args: Any, **kwargs: Any) -> Any:
            began = self._began(schedule)
            try:
                return original(schedule, *args, **kwargs)
            finally:
                if began:
                    self._ended()

        return step

    def _forward(self, original: Method) -> Method:
        @functools.wraps(original)
        def forward_one_chunk(stage: object, *args: Any, **kwargs: Any) -> Any:
            self._chunk(args, kwargs)
            return original(stage, *args, **kwargs)

        return forward_one_chunk

    def _backward(self, original: Method) -> Method:
        @functools.wraps(original)
        def backward_one_chunk(stage: object, *args: Any, **kwargs: Any) -> Any:
            self._chunk(args, kwargs)
            self._backward_began(stage, args, kwargs)
            try:
                return original(stage, *args, **kwargs)
            finally:
                self._backward_ended()

        return backward_one_chunk

    def _backward_weight(self, original: Method) -> Method:
        @functools.wraps(original)
        def backward_weight_one_chunk(stage: object, *args: Any, **kwargs: Any) -> Any:
            self._chunk(args, kwargs)
            self._backward_began(stage, (), {}, weights=pipelining.only_weights(stage))
            try:
                return original(stage, *args, **kwargs)
            finally:
                self._backward_ended()

        return backward_weight_one_chunk

    def _scale(self, original: Method) -> Method:
        @functools.wraps(original)
        def scale_grads(stage: object, *args: Any, **kwargs: Any) -> Any:
            self._reduced(stage)
            return original(stage, *args, **kwargs)

        return scale_grads

    def _reduce(self, original: Method) -> Method:
        @functools.wraps(original)
        def perform_reduce_grad(stage: object, *args: Any, **kwargs: Any) -> Any:
            result = original(stage, *args, **kwargs)
            self._reduced(stage)
            return result

        return perform_reduce_grad

    @guard.guard("pipeline reduction")
    def _reduced(self, held: object) -> None:
        stage = pipelining.stage(held)
        if stage is not None:
            self._reductions.reduced_in(stage.module)

    @guard.guard("pipeline schedule")
    def _began(self, schedule: object) -> bool:
        session = self._session
        for stage in pipelining.stages(schedule):
            session.sink.mesh(*stage.mesh())
            session.names.add_stage(stage)
            session.pipeline = stage.ranks
            for module in stage.module.modules():
                session.note_layout(module)
        session.clock.schedule_began(trains=pipelining.trains(schedule))
        return True

    @guard.guard("pipeline schedule: end")
    def _ended(self) -> None:
        self._session.clock.schedule_ended()

    @guard.guard("pipeline chunk")
    def _chunk(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        number = pipelining.chunk(args, kwargs)
        if number is not None:
            self._session.clock.chunk_began(number)

    @guard.guard("pipeline backward")
    def _backward_began(
        self, held: object, args: tuple[Any, ...], kwargs: dict[str, Any], *, weights: bool = False
    ) -> None:
        """Note what kind of backward begins; in the last one data parallelism inside the stage reduces."""
        session, stage = self._session, pipelining.stage(held)
        session.staged = StageBackward(from_loss=stage is None or stage.is_last, only_weights=weights)
        if stage is not None and pipelining.is_last_backward(args, kwargs):
            session.note_wrapper(stage.module)

    @guard.guard("pipeline backward: end")
    def _backward_ended(self) -> None:
        self._session.staged = None
