"""Solve a word problem: `python app.py "Ada has 12 plums and buys 5. How many are there?"`."""

from math_example.command import main

if __name__ == "__main__":
    raise SystemExit(main())
