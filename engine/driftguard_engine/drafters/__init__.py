"""Drafters: a smaller model, or n-grams of the sequence itself. How they are loaded, swapped and restored."""
