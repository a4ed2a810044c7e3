"""Who supplies the log-normalizers: state as buffers, one way to ask, and the ways it changes."""
