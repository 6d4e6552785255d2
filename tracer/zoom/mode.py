"""The dispatch mode that shows a region each operation, before and after it runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from tensortrace.tracer.zoom.region import Region


class OperationMode(TorchDispatchMode):
    """Runs every operation once, as it was called: the region only looks.

    Dispatch modes stand below autograd and autocast: what is seen is what is computed. (A function mode
    would turn fused paths off, and with them bits.)
    """

    supports_higher_order_operators = True

    def __init__(self, region: Region) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._region = region

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Tell torch not to wrap the method below, which would import the whole compiler."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Show the operation, run it, show what came out."""
        kwargs = kwargs or {}
        started = self._region.began(func, args, kwargs)
        result = func(*args, **kwargs)
        if started is not None:
            self._region.ended(started, result)
        return result
