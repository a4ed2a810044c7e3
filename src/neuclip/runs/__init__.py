"""A run from its settings to its results: build, checkpoint, lifecycle, summary."""
