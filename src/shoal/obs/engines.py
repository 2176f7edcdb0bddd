"""The metrics of several engines as one text: each sample gets its engine's number as a label.

Knows the text format of Prometheus; knows no metrics. A family is described once, however many engines have it.
"""

from collections.abc import Mapping


def join_engines(texts: Mapping[int, str]) -> str:
    """One text of the engines' texts, by number.

    >>> print(join_engines({0: "# TYPE a gauge\\na 1\\n", 1: '# TYPE a gauge\\na{b="c"} 2\\n'}), end="")
    # TYPE a gauge
    a{engine="0"} 1
    a{engine="1",b="c"} 2
    """
    heads: dict[str, list[str]] = {}  # family → its description
    samples: dict[str, list[str]] = {}
    for number, text in sorted(texts.items()):
        family = ""
        seen: set[str] = set()
        for line in text.splitlines():
            if line.startswith("# "):
                family = line.split(" ", 3)[2]
                if family not in seen:
                    seen.add(family)
                    fresh = family not in heads
                    heads.setdefault(family, [])
                if fresh:
                    heads[family].append(line)
            elif line:
                samples.setdefault(family, []).append(labelled(line, number))
    lines = [line for family, head in heads.items() for line in [*head, *samples.get(family, ())]]
    return "".join(f"{line}\n" for line in [*samples.get("", ()), *lines])


def labelled(sample: str, engine: int) -> str:
    """
    >>> labelled('a_bucket{le="0.1"} 3.0', 2)
    'a_bucket{engine="2",le="0.1"} 3.0'
    """
    end = min(place for place in (sample.find("{"), sample.find(" ")) if place >= 0)
    if sample[end] == "{":
        return f'{sample[: end + 1]}engine="{engine}",{sample[end + 1 :]}'
    return f'{sample[:end]}{{engine="{engine}"}}{sample[end:]}'
