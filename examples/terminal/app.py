"""Repair a generated package with mini-swe-agent: `python app.py --seed 3`."""

from terminal_example.command import main

if __name__ == "__main__":
    raise SystemExit(main())
