"""The maths and the methods. Knows torch and `neuclip.distributed`; nothing of data, files or progress."""
