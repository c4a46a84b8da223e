"""`python -m k3mlx`: the same as the `k3mlx` command."""

import sys

from .cli import main

sys.exit(main())
