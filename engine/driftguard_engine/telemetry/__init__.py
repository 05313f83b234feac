"""Acceptance records and captured traffic of finished requests, spooled on disk and sent to the sidecar."""
