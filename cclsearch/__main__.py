"""`python -m cclsearch`."""

import os
import sys

if sys.path and os.path.abspath(sys.path[0]) == os.getcwd() != os.path.dirname(os.path.dirname(__file__)):
    del sys.path[0]  # `-m` adds the working directory, whose files must not take the place of installed modules

from cclsearch.cli import main

sys.exit(main())
