"""Slow and obvious twins of the formulas, written from the paper with loops and `math`, in float64."""
