"""Ours beside the packages that people would use instead."""
