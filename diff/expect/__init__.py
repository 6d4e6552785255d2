"""Which differences were declared (``--expect``): rules as written, what each met, what follows from them."""
