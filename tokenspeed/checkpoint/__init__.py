"""Where a model's files are, and what their headers say. Reads no weight, never imports torch."""
