"""The engines side by side: what is measured, where it runs, and how it is told."""
