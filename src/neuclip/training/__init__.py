"""The training loop and what it calls. It knows no files of a run: saving and evaluation are handed to it."""
