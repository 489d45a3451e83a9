"""Other projects' names over exkv, for scripts that are written already."""
