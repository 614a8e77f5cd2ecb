"""Long prompts, read chunk by chunk between the steps of rows that run (`Session(prefill_chunk=…)`).

One prompt is read at a time, by target and drafter both, in the last place of the batch, which is kept for it. What
that leaves is saved with the prompt, so that its rows start as later samples of a prompt do: by a copy.
"""

from __future__ import annotations

from collections.abc import Sequence

from bass_core.drafters import Drafter
from bass_core.loop.rows import Prompt, Request, Rows
from bass_core.model.runner import Runner


def read_sources(target: Runner, drafter: Drafter, prompts: Sequence[Prompt], places: range) -> None:
    """Target and drafter read the sources of prompts that begin in these places, if their models read any."""
    if target.sources is not None:
        sources = [prompt.source for prompt in prompts]
        drafter.read_sources(sources, places, target.read(sources, places))


class LongPrompts:
    """Which prompt is read in chunks, and how far that is."""

    def __init__(self, chunk: int | None, rows: Rows, target: Runner, drafter: Drafter):
        """chunk: tokens of a prompt that are read in one pass at most; None: all of them."""
        self.chunk, self.rows, self.target, self.drafter = chunk, rows, target, drafter
        self.request: Request | None = None  # whose prompt is being read
        # Between two decode steps there is one chunk at most, and one prefill; without chunks, prefills come first.
        self.turn = self.admits = True  # whether the next may be a chunk, or a prefill, while rows run
        self._read = 0  # tokens of the prompt that were read

    def starting(self, waiting: Sequence[Request], free: int) -> list[Request]:
        """Which of the waiting rows can start in `free` places: the first ones, but for those whose prompt is still to
        be read. The first of these has its place kept, and is `request` from now on."""
        prompt = None if self.request is None else self.request.prompt
        same = (each for each in waiting if each.prompt is prompt and self._is_long(each.prompt))
        self.request = next(same, None)  # of its samples one that was not cancelled
        if self.request is None:
            self._read = 0
            self.request = next((each for each in waiting[:free] if self._is_long(each.prompt)), None)
        places = free if self.request is None else free - 1
        return [each for each in waiting if not self._is_long(each.prompt)][:places]

    def _is_long(self, prompt: Prompt) -> bool:
        """Whether this prompt is still to be read in chunks."""
        return self.chunk is not None and len(prompt.ids) > self.chunk and prompt.saved is None

    def read(self) -> range:
        """Read a chunk. Returns its positions. After the last one, the prompt has what its rows start from; an
        interrupted chunk is read again."""
        prompt, place = self.request.prompt, self.rows.max_rows - 1
        places, whole = range(place, place + 1), len(prompt.ids)
        tokens = prompt.ids.to(self.rows.device)[None]  # [1, P]
        chunk = range(self._read, min(self._read + self.chunk, whole))
        if chunk.start == 0:
            self.target.cache.clear(places)  # a row that failed leaves NaN, and kernels read whole blocks
            read_sources(self.target, self.drafter, [prompt], places)
        logits = self.target.feed_last(tokens, [chunk.stop], len(chunk), places, prompt=whole)
        self.drafter.prefill_chunk(tokens, chunk, place, self.target.hidden(places))
        if chunk.stop == whole:
            prompt.logits = logits[0]
            prompt.saved = self.target.cache.save_row(place, whole), self.drafter.save_row(place, whole)
            self.request = None
        self._read = chunk.stop
        self.turn = False
        return chunk

    def prefilled(self) -> None:
        """Rows have started."""
        self.admits = self.chunk is None
        self.turn |= not self.rows.live  # all of them have ended, too

    def decoded(self) -> None:
        """Rows that run have had a step."""
        self.turn = self.admits = True
