"""Say which department a customer's message is for: `python app.py "Where is my umbrella?"`."""

from desk_example.command import main

if __name__ == "__main__":
    raise SystemExit(main())
