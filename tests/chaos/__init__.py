"""What breaks around a sidecar, done to a real one on purpose: `make chaos`."""
