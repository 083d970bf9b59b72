"""What the tools have in common; nothing here is run by itself."""
