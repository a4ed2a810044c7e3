"""What a run is told: typed sections, read from YAML and flags. The floor of the package: imports no torch."""
