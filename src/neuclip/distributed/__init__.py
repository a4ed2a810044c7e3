"""Communication between ranks, which with one rank does nothing, and failures that end all ranks together."""
