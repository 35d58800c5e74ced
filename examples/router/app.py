"""Route and answer a customer's message: `python app.py "Where is my umbrella?"`."""

from router_example.command import main

if __name__ == "__main__":
    raise SystemExit(main())
