"""Data sets by name: how each is fetched and built. The core knows `catalogue` alone."""
