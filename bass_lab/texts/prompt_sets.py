"""The two prompt sets that everything here is shown and measured on.

* `"mini"`: signature and docstring of the 164 problems of the mini evaluation set. The embedded pair has met their
  parts, never their composition: in distribution.
* `"library"`: the beginnings of functions from modules of Python's standard library that training did not see. Out of
  distribution: the models continue with plausible nonsense, and the draft is less often right about it.

Both are files in `assets/`, the same on every machine; `python -m bass_lab.texts.prompt_sets` writes the second anew
from the running Python's library.
"""

import json
from pathlib import Path

from bass_core.environment import write_whole
from bass_core.inputs import one_of
from bass_lab.evaluation import load_problems
from bass_lab.texts import corpus

PROMPT_SETS = ("mini", "library")
LIBRARY = Path(__file__).parents[1] / "assets" / "library_prompts.jsonl"
LIBRARY_SIZE = 96


def prompt_set(name: str, count: int | None = None) -> list[str]:
    """The first `count` prompts of the set "mini" (164) or "library" (96), all if None.

    Raises ValueError for another name or for more prompts than the set has.
    """
    one_of("prompt_set", name, PROMPT_SETS)
    if name == "mini":
        prompts = [problem.prompt for problem in load_problems()]
    else:
        prompts = [json.loads(line)["prompt"] for line in LIBRARY.read_text(encoding="utf-8").splitlines()]
    if count is not None and not 0 < count <= len(prompts):
        raise ValueError(f"the prompt set {name!r} has {len(prompts)} prompts, count={count} was asked for")
    return prompts[:count]


def main() -> None:
    # a step that shares no factor with the number of prompts mixes the modules: any first few are from several
    found = corpus.held_out_prompts()
    spread = [found[37 * i % len(found)] for i in range(LIBRARY_SIZE)]
    lines = [json.dumps({"module": module, "prompt": prompt}) for module, prompt in spread]
    write_whole(LIBRARY, "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
