"""A text-to-SQL app on LangGraph, and everything needed to train it on a laptop.

`app` is the program itself and knows nothing of lightspan; `database` runs its queries safely;
`names`, `queries`, `worlds` and `demonstrations` generate the data; `reward` scores an answer;
`model` builds the small model that is trained.
"""
