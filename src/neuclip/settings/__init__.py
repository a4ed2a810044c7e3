"""The settings of a run: typed sections, read from YAML and flags. Imports no torch."""
