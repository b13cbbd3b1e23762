"""`python -m molt.cli` is the `molt` script."""

from __future__ import annotations

from molt.cli import main

if __name__ == "__main__":
    main()
