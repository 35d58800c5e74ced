"""Play a TextWorld game: `python app.py --seed 3`."""

from textworld_example.command import main

if __name__ == "__main__":
    raise SystemExit(main())
