"""The command `neuclip`: parsing and printing only. Each command is one function, imported when it is called."""
