"""The releases of torch and transformers that the test suite ran with."""

from __future__ import annotations

import warnings

import torch
import transformers

TESTED = {"torch": ("2.11", "2.15"), "transformers": ("5.23", "5.24")}  # by package: the first and the last release


def warn_of_newer() -> None:
    """Warn of each package that is newer than its last tested release; Python shows such a line once a process."""
    for name, installed in {"torch": torch.__version__, "transformers": transformers.__version__}.items():
        last = TESTED[name][1]
        if _release(installed) > _release(last):
            warnings.warn(
                f"{name} {installed} is newer than {last}, the last release that burst-attention was tested with; if "
                "it fails, run pip install -c constraints.txt -e '.[hf]' in the checkout",
                stacklevel=1,  # so that calls from several places show it once
            )


def _release(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(".")[:2]))
