"""What each part is worth: our attention, each time with one thing undone."""
