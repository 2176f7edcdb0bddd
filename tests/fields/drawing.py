"""Checks of the fields that decide which tokens are drawn."""

from tests.fields.registry import BOTH, CHAT, COMPLETIONS, FOUR, RESPONSES, THREE, checks
from tests.fields.server import GREEDY, FieldServer, encoded

HOT = 5.0  # a temperature at which no two answers are the same
Q, X, Z = (encoded(letter)[0] for letter in "qxz")


@checks(FOUR, "temperature")
def temperature(server: FieldServer, path: str) -> None:
    greedy = {server.text(path, temperature=0) for _ in range(2)}
    assert len(greedy) == 1
    drawn = {server.text(path, temperature=HOT) for _ in range(3)}
    assert len(drawn) == 3
    assert not drawn & greedy


@checks(FOUR, "top_k", "top_p")
def only_the_likeliest(server: FieldServer, path: str) -> None:
    greedy = server.text(path, **GREEDY)
    for field in ({"top_k": 1}, {"top_p": 1e-6}):
        assert server.text(path, temperature=HOT, **field) == greedy
    assert server.text(path, temperature=HOT, top_k=-1, top_p=1) != greedy


@checks(THREE, "min_p")
def min_p(server: FieldServer, path: str) -> None:
    assert server.text(path, temperature=HOT, min_p=1) == server.text(path, **GREEDY)
    assert server.text(path, temperature=HOT, min_p=0) != server.text(path, **GREEDY)


@checks(THREE, "seed")
def seed(server: FieldServer, path: str) -> None:
    first, again, other = (server.text(path, temperature=1, seed=number) for number in (7, 7, 8))
    assert first == again != other


@checks(THREE, "presence_penalty", "frequency_penalty", "repetition_penalty")
def penalties(server: FieldServer, path: str) -> None:
    """Tokens that have come already come less often."""
    limit = {"max_output_tokens" if path == RESPONSES else "max_tokens": 40}

    def different(**fields: float) -> int:
        return len(set(encoded(server.text(path, **GREEDY, **limit, **fields))))

    plain = different()
    for name, value in (("presence_penalty", 2), ("frequency_penalty", 2), ("repetition_penalty", 3)):
        assert different(**{name: value}) > plain, name
    for name, value in (("presence_penalty", -2), ("frequency_penalty", -2)):
        assert different(**{name: value}) < plain, name


@checks(BOTH, "allowed_token_ids")
def allowed_tokens(server: FieldServer, path: str) -> None:
    assert set(server.tokens(path, allowed_token_ids=[Q, X], max_tokens=40)) == {Q, X}


@checks(BOTH, "bad_words")
def bad_words(server: FieldServer, path: str) -> None:
    body = {"allowed_token_ids": [Q, X, Z], "max_tokens": 60, "seed": 1, "temperature": 2}
    assert "qx" in server.text(path, **body)
    held = server.text(path, **body, bad_words=["qx", "z"])
    assert set(held) == {"q", "x"}
    assert "qx" not in held


@checks(BOTH, "logit_bias")
def logit_bias(server: FieldServer, path: str) -> None:
    assert server.tokens(path, logit_bias={str(Q): 100}, max_tokens=5) == [Q] * 5
    assert Q not in server.tokens(path, allowed_token_ids=[Q, X], logit_bias={str(Q): -100}, max_tokens=20)


@checks(BOTH, "n")
def samples(server: FieldServer, path: str) -> None:
    choices = server.ask(path, n=3, temperature=HOT, return_token_ids=True)["choices"]
    assert [one["index"] for one in choices] == [0, 1, 2]
    assert len({tuple(one["token_ids"]) for one in choices}) == 3


@checks(COMPLETIONS, "best_of")
def best_of(server: FieldServer, path: str) -> None:
    """The samples with the best mean logprobs are kept, the best first."""
    body = {"seed": 3, "logprobs": 0, "ignore_eos": True, "max_tokens": 6}
    every = server.ask(path, n=4, **body)["choices"]
    means = sorted(every, key=lambda one: -sum(one["logprobs"]["token_logprobs"]))
    kept = server.ask(path, n=2, best_of=4, **body)["choices"]
    assert [one["text"] for one in kept] == [one["text"] for one in means[:2]]


@checks(BOTH, "use_beam_search", "length_penalty")
def beams(server: FieldServer, path: str) -> None:
    """Two beams: the likelier whole comes first, and is at least as likely as the greedy one."""

    def logprob(choice: dict[str, object]) -> float:
        shown = choice["logprobs"]
        assert isinstance(shown, dict)
        return sum(shown["token_logprobs"] if path == COMPLETIONS else [one["logprob"] for one in shown["content"]])

    asked = {"logprobs": 0} if path == COMPLETIONS else {"logprobs": True}
    body = {"max_tokens": 6, "ignore_eos": True, **asked}
    first, second = server.ask(path, n=2, use_beam_search=True, **body)["choices"]
    assert logprob(first) >= logprob(second)
    assert logprob(first) >= logprob(server.choice(path, **GREEDY, **body)) - 1e-4
    # with ends in reach, a penalty above 1 favours long beams and one below 0 short ones
    ends = {"max_tokens": 8, "n": 2, "use_beam_search": True, "return_token_ids": True}
    ends["stop_token_ids"] = list(range(5, 320, 3))
    long, short = (
        len(server.ask(path, **ends, length_penalty=penalty)["choices"][0]["token_ids"]) for penalty in (10, -10)
    )
    assert long > short


@checks(CHAT, "top_logprobs", "logprobs")
def chat_logprobs(server: FieldServer, path: str) -> None:
    assert server.choice(path)["logprobs"] is None
    shown = server.choice(path, **GREEDY, logprobs=True, top_logprobs=3)["logprobs"]["content"]
    assert len(shown) == 24
    for one in shown:
        assert [other["logprob"] for other in one["top_logprobs"]] == sorted(
            (other["logprob"] for other in one["top_logprobs"]), reverse=True
        )
        assert len(one["top_logprobs"]) == 3
        assert one["top_logprobs"][0]["logprob"] == one["logprob"], "the greedy token is the likeliest"
    assert server.choice(path, logprobs=True)["logprobs"]["content"][0]["top_logprobs"] == []
