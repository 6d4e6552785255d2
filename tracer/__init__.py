"""Recording of training runs, and the traces that it leaves."""

__all__: list[str] = []
