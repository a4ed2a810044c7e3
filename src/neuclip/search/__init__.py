"""Searches the images of a folder by text or by image: `index.py` embeds and searches, `server.py` serves the page."""
