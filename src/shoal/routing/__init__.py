"""Which engine gets a request: by turns, by load, or by the prefix that it holds.

Knows engines by their numbers and jobs by theirs. Knows no sockets, no torch and no clock, so that a simulator runs the
same code.
"""
