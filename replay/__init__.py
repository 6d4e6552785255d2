"""Re-execution of recorded boundaries; nothing is implemented yet."""
