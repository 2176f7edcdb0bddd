"""A tokenizer that knows its special tokens by secret names alone: their plain names are text to it.

Owns how a tokenizer's document is changed for that. Knows no templates and no messages.
"""

import json
import re

from tokenizers import Tokenizer as Backend

from shoal.text.special import SecretNames

MARKER = re.compile("<[|\uff5c].+[|\uff5c]>", re.DOTALL)  # the shape of a mark of roles and turns


def special_tokens(backend: Backend) -> list[str]:
    """The special tokens of a tokenizer, and those that look like marks of roles: some models do not call theirs
    special (<｜User｜>). Other added tokens, such as <think>, may be written by users."""
    added = (token for _, token in sorted(backend.get_added_tokens_decoder().items()))
    return [token.content for token in added if token.special or MARKER.fullmatch(token.content)]


def hiding(backend: Backend, names: SecretNames) -> Backend:
    """The same tokenizer, which finds special tokens by their secret names alone; ids are unchanged.

    They are renamed in the model's vocabulary too: some models would find their plain names there.
    """
    document = json.loads(backend.to_str())
    for added in document["added_tokens"]:
        added["content"] = names.hidden.get(added["content"], added["content"])
    document["post_processor"] = None  # it adds tokens by name, and the template writes them all
    model, hidden = document["model"], names.hidden
    if isinstance(model.get("vocab"), dict):
        model["vocab"] = {hidden.get(token, token): id for token, id in model["vocab"].items()}
    else:
        model["vocab"] = [[hidden.get(piece, piece), score] for piece, score in model["vocab"]]
    if model.get("unk_token") in hidden:
        model["unk_token"] = hidden[model["unk_token"]]
    if model.get("merges"):
        pairs = (merge if isinstance(merge, list) else merge.split(" ", 1) for merge in model["merges"])
        model["merges"] = [pair for pair in pairs if not hidden.keys() & {*pair, "".join(pair)}]
    return Backend.from_str(json.dumps(document))
