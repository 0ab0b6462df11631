"""From prompts to sealed shards of hidden states: prompts -> responses -> tokens and loss mask -> states -> shards.

Every stage is `python -m data_prep STAGE`; `pipeline` meets this package at the manifest and the sample format only.
"""
