"""`python -m verify.claims`: the same as `python -m verify claims`."""

import sys

from verify.__main__ import main

sys.exit(main(["claims", *sys.argv[1:]]))
