"""Canary probes: a fixed set of prompts, replayed greedily through the server whose traffic is watched."""
