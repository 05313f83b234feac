"""Verification arithmetic: the torch reference that every other backend must equal, token for token."""
