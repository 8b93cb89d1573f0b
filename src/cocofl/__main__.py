"""``python -m cocofl``: the command line, from a source tree that is not installed, too."""

from cocofl.cli import main

main()
