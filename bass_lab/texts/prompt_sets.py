"""The built-in prompt sets, and prompt sets from files.

* `"mini"`: signature and docstring of the mini evaluation set's 164 problems. In distribution.
* `"library"`: beginnings of standard-library functions outside the training data. Out of distribution.
* `"edits"` and `"questions"`: 8 conversations each for chat models, such as `load_pair("smollm2")`: repeat a text with
  a change, and answer an open question.

`python -m bass_lab.texts.prompt_sets` rewrites `"library"`. Any file of JSON lines, gzipped or not, is a prompt set.
Each line has `prompt` (a text or a conversation), `messages` (`[{"role": "user", "content": "…"}]`) or `turns` (user
messages, as in Spec-Bench and SPEED-Bench; only the first is used).
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
CHATS = ("edits", "questions")
FILES = ("*.jsonl", "*.jsonl.gz")
NAMES = (*PROMPT_SETS, *CHATS, *FILES)
FIELDS = ("prompt", "messages", "turns")
CONVERSATION = 'a conversation, [{"role": "user", "content": "…"}, …]'
ACCEPTED = {"prompt": f"a text or {CONVERSATION}", "messages": CONVERSATION, "turns": "a list of texts"}
MASKED = "FULL BENCHMARK DATA SHOULD BE FETCHED"  # SPEED-Bench's mark for unpublished prompts
LIBRARY, CHAT = (Path(__file__).parents[1] / "assets" / f"{name}_prompts.jsonl" for name in ("library", "chat"))
LIBRARY_SIZE = 96


Prompt: TypeAlias = str | list[dict[str, Any]]  # a text or a conversation


def prompt_set(name: str | Path, count: int | None = None) -> list[Prompt]:
    """Return the first `count` prompts (None: all) of "mini" (164), "library" (96), "edits" or "questions" (8 each), or
    a file of JSON lines. Raises ValueError for another name, too many prompts, and a line without a prompt;
    FileNotFoundError for a missing file."""
    if is_file(name):
        prompts = prompts_in(Path(name))
    elif one_of("prompt_set", name, NAMES) == "mini":
        prompts = [problem.prompt for problem in load_problems()]
    elif name in CHATS:
        lines = map(json.loads, CHAT.read_text("utf-8").splitlines())
        prompts = [line["prompt"] for line in lines if line["kind"] == name]
    else:
        prompts = prompts_in(LIBRARY)
    if count is not None and not 0 < count <= len(prompts):
        raise ValueError(f"count must be from 1 to {len(prompts)} for the prompt set {name!r}; got {count}")
    return prompts[:count]


def prompts_in(path: Path) -> list[Prompt]:
    """Return the prompts of a file of JSON lines with any name. Raises the errors of `prompt_set`."""
    return file_rows(path, _prompt, "a prompt")


def is_file(name: str | Path) -> bool:
    """Return True if the name is a file name (of an existing file or not), not a built-in prompt set."""
    return any(fnmatchcase(str(name), pattern) for pattern in FILES)


def label(name: str | Path) -> str:
    """Return the name of a prompt set in records. A file's name gets a digest, to distinguish files of one name."""
    if not is_file(name):
        return one_of("prompt_set", name, NAMES)
    return f"{Path(name).name} {hashlib.sha256(Path(name).read_bytes()).hexdigest()[:8]}"


def beside_ours(name: str | Path, count: int | None = None) -> dict[str, list[Prompt]]:
    """Return "mini", "library" and the prompt set `name`, by label. count: as in `prompt_set`."""
    return {label(each): prompt_set(each, count) for each in dict.fromkeys((*PROMPT_SETS, name))}


def _prompt(line: Any) -> Prompt:
    """Return the prompt of a line. Raises ValueError with the name of a wrong field."""
    if not isinstance(line, dict):
        raise ValueError(f"it must be a JSON object, got {type(line).__name__}")
    field = next((field for field in FIELDS if field in line), None)
    if field is None:
        raise ValueError(f"it needs one of the fields {', '.join(FIELDS)}; it has {', '.join(line) or 'no field'}")
    value = line[field]
    if field == "turns" and isinstance(value, list) and value:
        value = [{"role": "user", "content": value[0]}]
    texts = [value] if isinstance(value, str) and field == "prompt" else _contents(value)
    if not texts or not all(isinstance(text, str) and text for text in texts):
        raise ValueError(f"its field {field} must be {ACCEPTED[field]}; got {json.dumps(line[field])[:60]}")
    if any(text.startswith(MASKED) for text in texts):
        raise ValueError(f"its field {field} is masked; run NVIDIA's prepare_data.py of SPEED-Bench to fill it in")
    return value


def _contents(messages: Any) -> list[Any]:
    """Return the contents of a conversation's messages, or [] if `messages` is no conversation."""
    whole = isinstance(messages, list) and all(isinstance(each, dict) and "role" in each for each in messages)
    return [each.get("content") for each in messages] if whole else []


def main() -> None:
    # A step without a common factor with the number of prompts mixes the modules.
    found = corpus.held_out_prompts()
    spread = [found[37 * i % len(found)] for i in range(LIBRARY_SIZE)]
    lines = [json.dumps({"module": module, "prompt": prompt}) for module, prompt in spread]
    write_whole(LIBRARY, "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
