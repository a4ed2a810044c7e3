"""Clip art and stamps of Debian's packages as data sets: `tuxpaint`, `pysiogame`, `openclipart`."""
