"""Training steps of models with recurrent layers: ``step`` of two.

burst bench hybrid [--models qwen3_5_text bamba] [--seq-len 2048] [--worlds 1 2 4] [--rounds 5]"""

from __future__ import annotations

from ..arguments import asked
from .step import StepArguments, report


def main(arguments: list[str]) -> None:
    default = StepArguments(models=("qwen3_5_text", "bamba"), worlds=(1, 2, 4))
    report(asked(default, __doc__, "burst bench hybrid", arguments))
