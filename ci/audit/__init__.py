"""A user's own training logs: read as a stream of records, folded, and held against the ledger.

`read` makes records of any supported format, `fold` makes a bounded summary of however many there are, `findings` are
pure functions of summaries, `known` asks the ledger about them and `tell` says it all in words. One direction.
"""
