"""The command line: one file per command, rendering beside it."""
