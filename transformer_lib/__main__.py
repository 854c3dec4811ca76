"""``python -m transformer_lib`` is the program ``transformer-lib``."""

import sys

from transformer_lib.command_line import main

sys.exit(main())
