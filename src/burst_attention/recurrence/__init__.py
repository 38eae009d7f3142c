"""Recurrent layers and short convolutions over the ranks of a sequence: ranks exchange states and borders."""
