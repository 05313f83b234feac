"""Scrapes the metrics of serving engines and stores what they counted as windows."""
