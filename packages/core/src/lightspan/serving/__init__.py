"""Trained policies behind one OpenAI-compatible endpoint: `lightspan serve RUN`.

In goes the folder of a finished run, out come answers to whoever may call: `endpoint` loads what
the run left and serves it, `visitors` has the gateway's terms for those who use it and counts them.
"""
