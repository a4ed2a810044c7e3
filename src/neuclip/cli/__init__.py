"""The command `neuclip`: parsing and printing only. One module per command, imported when it is called."""
