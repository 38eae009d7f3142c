"""Ours, and the packages that people would use instead."""
