"""Fault injection: attacks and failures around a real sidecar, on purpose. `make chaos` runs it."""
