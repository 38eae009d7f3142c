"""Measurements: the work on each rank, the checks of its results, and the rows of figures."""
