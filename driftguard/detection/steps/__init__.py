"""What a fold does, in order."""
