"""One claim each, measured by a command of its own: speed, memory, error, agreement, kernels on a GPU."""
