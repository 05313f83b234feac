"""The reference in numpy: every other backend must give the same tokens."""
