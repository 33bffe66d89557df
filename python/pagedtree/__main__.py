import sys

from pagedtree.cli import main

sys.exit(main())
