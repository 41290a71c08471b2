"""`python -m rt`: the command `rt`."""

from __future__ import annotations

import sys

from rt.cli.main import main

sys.exit(main())
