"""Ask a question about a SQLite database: `python app.py "How many singers are there?"`."""

from sql_example.command import main

if __name__ == "__main__":
    raise SystemExit(main())
