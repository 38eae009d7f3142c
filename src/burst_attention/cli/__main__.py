"""Run ``burst`` as a module, as torchrun does: ``torchrun -m burst_attention.cli train ...``."""

import sys

from . import main

sys.exit(main())
