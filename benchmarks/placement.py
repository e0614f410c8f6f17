"""Placement of ranks on uneven links: real training over shaped links, and simulation on published bandwidths.

    sudo python benchmarks/placement.py devices         # namespaces as the devices of one node
    sudo python benchmarks/placement.py real            # namespaces with shaped links on this machine; needs root
    python benchmarks/placement.py published FOLDER     # FOLDER has sailor-multizone.csv and galvatron-allreduce.csv

Each layout is run (or predicted) with its default placement, where AMP (Li et al. 2022) and Megatron-LM place ranks
(degrees in the order tp, dp, pp, nodes as given), with the worst and the best one found over orders of the degrees and
nodes together, and with the nodes alone in another order.
"""

from __future__ import annotations

import sys
from pathlib import Path

from placement_published import published
from placement_real import real, real_devices

if __name__ == "__main__":
    if sys.argv[1:2] == ["real"]:
        real()
    elif sys.argv[1:2] == ["devices"]:
        real_devices()
    elif len(sys.argv) == 3 and sys.argv[1] == "published":
        published(Path(sys.argv[2]))
    else:
        sys.exit(__doc__)
