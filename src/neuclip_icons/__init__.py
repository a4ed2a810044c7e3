"""The demo's data: icons and emoji drawn from installed packages, each with its name as the caption.

`python -m neuclip_icons icons-30k FOLDER` builds the set; neuclip itself knows its name and its folder only.
"""
