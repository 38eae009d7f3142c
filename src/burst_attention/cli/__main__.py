"""``python -m burst_attention.cli``, which torchrun can start: ``torchrun -m burst_attention.cli train ...``."""

import sys

from . import main

sys.exit(main())
