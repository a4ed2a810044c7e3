"""Ranks: collectives that are the identity on one, and failures that end all of them together."""
