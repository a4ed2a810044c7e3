"""What the data holds, what a run on it would do and what would go wrong, in seconds and without training."""
