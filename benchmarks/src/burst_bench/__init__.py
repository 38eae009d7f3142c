"""Measure the strategies next to each other, and report the results."""
