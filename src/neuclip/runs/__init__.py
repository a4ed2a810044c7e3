"""A run from its settings to its results: build, lifecycle, checkpoint, evaluate, results, summary."""
