"""Play a quest in a text world: `python app.py --seed 3`."""

from quest_example.command import main

if __name__ == "__main__":
    raise SystemExit(main())
