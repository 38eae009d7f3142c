"""The shortest real path from a text corpus to a trained model over several ranks."""
