"""Simulated traffic, the exact oracle and the competitors of `tests.benchmarks.bench_detection`."""
