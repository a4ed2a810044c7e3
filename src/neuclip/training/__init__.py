"""The loop and what it needs. The only place where objectives, models and data meet."""
