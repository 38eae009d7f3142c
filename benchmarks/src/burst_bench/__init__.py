"""Measure the engines next to each other, and report the results."""
