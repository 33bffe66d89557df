import sys

from pagedtree.tools.cli import main

sys.exit(main())
