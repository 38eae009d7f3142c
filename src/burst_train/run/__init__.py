"""The folder of a run: its lock, metrics, tracking and interrupts."""
