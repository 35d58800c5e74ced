"""Ask a question about documents: `python app.py "Who is the mayor of the birthplace of ...?"`."""

from rag_example.command import main

if __name__ == "__main__":
    raise SystemExit(main())
