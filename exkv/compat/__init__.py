"""Other projects' interfaces over exkv, for existing scripts."""
