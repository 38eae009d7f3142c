"""Run ``burst bench`` on an emulated cluster.

Example: ``python -m burst_bench.cluster train --cluster 8x1 --link 100mbit none``.
"""

from __future__ import annotations

import sys

from ..command import CLUSTER, ClusterArguments, compare

if __name__ == "__main__":
    sys.exit(compare(CLUSTER, ClusterArguments, sys.argv[1:]))
