"""A run from its settings to its results: build, start or resume, checkpoints, evaluation, results."""
