"""Process groups and opaque tensors: posted exchanges, deadlines, agreement. Bytes only."""
