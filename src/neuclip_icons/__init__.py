"""Builds the demo's data set, icons-30k: icons and emoji drawn from installed packages, with their names as captions.

`python -m neuclip_icons icons-30k FOLDER` builds the set. neuclip itself knows only its name and its folder.
"""
