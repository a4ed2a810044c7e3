"""Preflight: what the data is, what a run on it would do, and what would go wrong, in seconds."""
