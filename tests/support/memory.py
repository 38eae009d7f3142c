"""Memory that nothing has been written to holds NaN (the largest number, of integers): what reads it shows."""

import torch


def poison_memory() -> None:
    """From here on, in this process: ``torch.empty`` and its kin, and what ``resize_`` adds.

    Torch does so where deterministic algorithms are asked for; an operation that has none warns.
    """
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(True, warn_only=True)
