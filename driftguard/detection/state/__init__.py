"""What is kept of each stream, and its stored form."""
