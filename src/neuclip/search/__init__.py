"""Find images of a folder by words or by an image: `index.py` embeds and searches, `server.py` is the page."""
