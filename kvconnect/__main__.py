"""``python -m kvconnect``: the same as the ``kvconnect`` command."""

from kvconnect.cli import main

main()
