"""Labelled faults for the benchmark of the diagnosis: measured in the real engine, or simulated."""
