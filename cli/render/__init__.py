"""One file per output: what a result looks like on a terminal or in a file."""
