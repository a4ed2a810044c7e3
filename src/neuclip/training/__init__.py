"""The training loop and what it calls. It reads and writes no run files: its caller passes in `save` and `evaluate`."""
