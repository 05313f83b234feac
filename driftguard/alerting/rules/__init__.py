"""Generates the alert rules for Prometheus."""
