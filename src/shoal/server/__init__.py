"""HTTP: OpenAI's API and a few plain endpoints in front of any EngineClient.

Owns requests and answers as clients see them, keys, streams and slow readers. Knows text/ and obs/; never an engine, a
scheduler or torch: it is handed an EngineClient.
"""
