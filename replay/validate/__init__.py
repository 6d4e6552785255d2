"""Two commits of a repository held against each other: base, base again, feature, each recorded."""
