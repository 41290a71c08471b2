"""The command `rt`, but it is killed when its standard input ends, because then its parent has ended.

`python -m sequencer.localcluster.node_main node ...`. This is a separate module, so that a node imports only
the modules that it needs.
"""

from __future__ import annotations

import sys
from typing import NoReturn

from rt.child_process import die_with_stdin
from rt.cli.main import main as rt


def main() -> NoReturn:
    die_with_stdin()
    sys.exit(rt(sys.argv[1:]))


if __name__ == "__main__":
    main()
