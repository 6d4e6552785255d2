"""What is compared with what in one step: a pure plan, executed by the engine."""
