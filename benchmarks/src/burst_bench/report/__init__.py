"""Report of a comparison: one HTML page, and its plots as image files."""
