"""Disaggregated prefill: prompts are computed by some engines, and the answers are continued by others.

    front      prefilling ───────────► prefilled ─► leaving ─► arriving ─► running ─► ended
    prefill    computes the prompt, chunk by chunk; full blocks go to its outbox, by name
    decode                 copies them from there into its prefix cache;  resumes the job, which hits them

Everything that can fail (an outbox that is full, a transfer, an engine) costs computed positions, never a token: what
is not in the decode engine's prefix cache when a job starts there is computed again.
"""
