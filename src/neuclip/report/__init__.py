"""The HTML page of a training run: records in, one self-contained file out. Imports no torch."""
