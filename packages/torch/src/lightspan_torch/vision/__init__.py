"""Vision models: images become placeholder ids of a prompt, and features in their places.

`processor` cuts images by the model's own processor of transformers. `tokenizer` renders chats with
images. `features` runs the vision part of a model, and gives prompts ids that identify them.
`checks` compares this path with a plain forward pass of the model.
"""
