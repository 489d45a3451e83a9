"""``python -m exkv`` is the command ``exkv``."""

import sys

from exkv.cli import main

if __name__ == "__main__":
    sys.exit(main())
