"""What a transformers model is: one walk finds its parts, and everything else asks its result."""

from .parts import Kind, Part, Reading, read

__all__ = ["Kind", "Part", "Reading", "read"]
