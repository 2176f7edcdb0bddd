"""HTTP: OpenAI's API and a few info endpoints in front of any EngineClient.

Owns requests and answers as clients see them, authentication, streams and slow clients. Knows text/, output/ and obs/;
never an engine, a scheduler or torch: it is given an EngineClient.
"""
