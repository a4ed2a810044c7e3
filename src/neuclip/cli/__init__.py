"""The command `neuclip`: parsing and printing only. One function per command, imported when it is called."""
