"""Trained policies behind one OpenAI-compatible endpoint: `lightspan serve RUN`.

In goes the folder of a finished run, or that of a model (`model_folder`), out come answers to
whoever may call: `endpoint` loads what is there and serves it, `visitors` has the gateway's terms
for those who use it and counts them.
"""
