"""The arithmetic in numpy that every other backend must equal, token for token."""
