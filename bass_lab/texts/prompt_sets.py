"""The two prompt sets that everything here is shown and measured on, and files of your own.

* `"mini"`: signature and docstring of the mini evaluation set's 164 problems. In distribution.
* `"library"`: the beginnings of functions of the standard library that training did not see. Out of distribution.

`python -m bass_lab.texts.prompt_sets` writes the second anew. Any file of JSON lines, gzipped or not, is a prompt set.
Each line has `prompt` (a text or a conversation), `messages` (`[{"role": "user", "content": "…"}]`) or `turns` (a
user's, of which the first is taken, as Spec-Bench and SPEED-Bench have them).
"""

from __future__ import annotations

import hashlib
import json
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, TypeAlias

from bass_core.checks import one_of
from bass_core.environment import write_whole
from bass_lab.evaluation import load_problems
from bass_lab.evaluation.problems import file_rows
from bass_lab.texts import corpus

PROMPT_SETS = ("mini", "library")
FILES = ("*.jsonl", "*.jsonl.gz")
NAMES = (*PROMPT_SETS, *FILES)  # what names a prompt set
FIELDS = ("prompt", "messages", "turns")
CONVERSATION = 'a conversation, [{"role": "user", "content": "…"}, …]'
ACCEPTED = {"prompt": f"a text or {CONVERSATION}", "messages": CONVERSATION, "turns": "a list of texts"}
MASKED = "FULL BENCHMARK DATA SHOULD BE FETCHED"  # how SPEED-Bench marks prompts that it must not publish
LIBRARY = Path(__file__).parents[1] / "assets" / "library_prompts.jsonl"
LIBRARY_SIZE = 96


Prompt: TypeAlias = str | list[dict[str, Any]]  # a text or a conversation


def prompt_set(name: str | Path, count: int | None = None) -> list[Prompt]:
    """Return the first `count` prompts of "mini" (164), "library" (96) or a file of JSON lines; all if None. Raises
    ValueError for another name, too many prompts, and naming a line without a prompt; FileNotFoundError."""
    if is_file(name):
        prompts = prompts_in(Path(name))
    elif one_of("prompt_set", name, NAMES) == "mini":
        prompts = [problem.prompt for problem in load_problems()]
    else:
        prompts = prompts_in(LIBRARY)
    if count is not None and not 0 < count <= len(prompts):
        raise ValueError(f"the prompt set {name!r} has {len(prompts)} prompts, count={count} was asked for")
    return prompts[:count]


def prompts_in(path: Path) -> list[Prompt]:
    """The prompts of a file of JSON lines, whatever it is called. Errors as `prompt_set`."""
    return file_rows(path, _prompt, "a prompt")


def is_file(name: str | Path) -> bool:
    """Whether this names a file of prompts, there or not, rather than a set of ours."""
    return any(fnmatchcase(str(name), pattern) for pattern in FILES)


def label(name: str | Path) -> str:
    """What records call a prompt set: its name; of a file with a digest, which tells files of one name apart."""
    if not is_file(name):
        return one_of("prompt_set", name, NAMES)
    return f"{Path(name).name} {hashlib.sha256(Path(name).read_bytes()).hexdigest()[:8]}"


def beside_ours(name: str | Path, count: int | None = None) -> dict[str, list[Prompt]]:
    """That prompt set, with "mini" and "library" to compare it with, by their labels; `count` as in `prompt_set`."""
    return {label(each): prompt_set(each, count) for each in dict.fromkeys((*PROMPT_SETS, name))}


def _prompt(line: Any) -> Prompt:
    """The prompt of a line of a file. Raises ValueError naming the field that has none."""
    if not isinstance(line, dict):
        raise ValueError(f"it is {type(line).__name__}, and no JSON object")
    field = next((field for field in FIELDS if field in line), None)
    if field is None:
        raise ValueError(f"it has none of the fields {', '.join(FIELDS)}; it has {', '.join(line) or 'no field'}")
    value = line[field]
    if field == "turns" and isinstance(value, list) and value:
        value = [{"role": "user", "content": value[0]}]
    texts = [value] if isinstance(value, str) and field == "prompt" else _contents(value)
    if not texts or not all(isinstance(text, str) and text for text in texts):
        raise ValueError(f"its field {field} must be {ACCEPTED[field]}; got {json.dumps(line[field])[:60]}")
    if any(text.startswith(MASKED) for text in texts):
        raise ValueError(f"its field {field} is masked; NVIDIA's prepare_data.py, beside SPEED-Bench, fills it in")
    return value


def _contents(messages: Any) -> list[Any]:
    """What the messages of a conversation say; nothing of what is no conversation."""
    whole = isinstance(messages, list) and all(isinstance(each, dict) and "role" in each for each in messages)
    return [each.get("content") for each in messages] if whole else []


def main() -> None:
    # a step that shares no factor with the number of prompts mixes the modules: any first few are from several
    found = corpus.held_out_prompts()
    spread = [found[37 * i % len(found)] for i in range(LIBRARY_SIZE)]
    lines = [json.dumps({"module": module, "prompt": prompt}) for module, prompt in spread]
    write_whole(LIBRARY, "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
