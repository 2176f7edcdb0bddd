"""API dialects: one file per API, from reading its body to writing its answer, whole or as events.

base.py is the interface; app.py lists the dialects that are served. Another API is one more file here and its name in
that list. Knows prepared requests and their outputs; no sockets, no engine.
"""
