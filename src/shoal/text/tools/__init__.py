"""Tool calls: a model's own format of them, the grammar that holds a call to the request's schemas, and its reader.

    Tool, ToolUse (calls.py) ──► a format (formats.py) ──► rules of a grammar (lark.py, compose.py)
                                        └────────────────► a reader of the text (reading.py, pythonic.py)

Once a call has begun, the grammar allows nothing but a valid one, so that reading it back cannot fail. Knows no HTTP,
no tokens beyond the names of special ones, and no engine.
"""
