"""Verification arithmetic: the reference that every other backend must equal, token for token."""
