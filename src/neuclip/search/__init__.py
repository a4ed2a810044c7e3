"""Finds images of a folder by a text or by another image."""
