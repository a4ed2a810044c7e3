"""The set iconify: icons and emoji of npm's @iconify/json, each with the words of its name."""
