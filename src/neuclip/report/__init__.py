"""Pages from records: one run, several runs side by side. Each is one self-contained file. Imports no torch."""
