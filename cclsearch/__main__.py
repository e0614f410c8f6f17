"""`python -m cclsearch`."""

import sys

from cclsearch.cli import main

sys.exit(main())
