"""Answer a question about a chart: `python app.py "What is A plus C?" --chart chart.png`."""

from charts_example.command import main

if __name__ == "__main__":
    raise SystemExit(main())
