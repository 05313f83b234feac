"""Who drafts: a smaller model, or n-grams of the sequence itself; loaded, swapped, kept over restarts."""
