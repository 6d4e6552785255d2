"""What optimizers' papers say that an update makes of what it reads, in float64: one family a file."""
