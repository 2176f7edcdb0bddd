"""The outputs of jobs that belong together: numbering, what still runs, and what was used."""

from shoal.core.job import Ending, Job
from shoal.core.params import SamplingParams
from shoal.output.outputs import Outputs

EOS = 2


def make(*counts: int) -> Outputs:
    jobs = [
        Job(id=f"j{number}", prompt=[5] * (number + 1), params=SamplingParams(n=n), seed=0)
        for number, n in enumerate(counts)
    ]
    return Outputs(jobs, None, frozenset({EOS}))


def test_samples_are_numbered_within_their_job_and_over_all() -> None:
    outputs = make(2, 3)
    assert [[one.number for one in samples] for samples in outputs.samples] == [[0, 1], [0, 1, 2]]
    assert [[one.index for one in samples] for samples in outputs.samples] == [[0, 1], [2, 3, 4]]
    assert outputs.running == 5
    assert [len(known) for known in outputs.prompt_logprobs] == [0, 0]


def test_what_was_used_is_summed_over_all_jobs() -> None:
    outputs = make(2, 1)
    (first, second), (other,) = outputs.samples
    for sample, tokens, cached, queue_s in ((first, 3, 0, 0.1), (second, 2, 16, 0.4), (other, 1, 8, 0.2)):
        for token in range(tokens):
            sample.take(token + 3, None)
        outputs.end(sample, Ending("length", cached_tokens=cached, queue_s=queue_s))
    assert outputs.running == 0
    assert (outputs.prompt_tokens, outputs.output_tokens) == (3, 6)
    assert outputs.cached_tokens == 0 + 8  # the second sample's hit is the first one's work
    assert outputs.queue_s == 0.4


def test_nothing_is_used_before_anything_has_ended() -> None:
    outputs = make(1)
    assert (outputs.output_tokens, outputs.cached_tokens, outputs.queue_s) == (0, 0, 0.0)


def test_only_the_models_own_end_tokens_are_no_stop_reason() -> None:
    outputs = make(2)
    for sample, token in zip(outputs.samples[0], (EOS, 7), strict=True):
        sample.take(token, None)
        outputs.end(sample, Ending("stop", token))
    assert [one.stop_reason for one in outputs.samples[0]] == [None, 7]
