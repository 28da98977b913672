"""Answers by a server with OpenAI's chat completions API (vLLM, SGLang, TGI, ...), for targets too big for here.

A server returns text, not tokens. `eagle3-hf extract` then finds tokens and mask from the chat template.
"""

from __future__ import annotations

import json
import logging
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any

from .dialogue import Dialogue

logger = logging.getLogger(__name__)

_BUSY = {408, 409, 425, 429, 500, 502, 503, 504}


class ServerAnswers:
    """Answers of an OpenAI-compatible server, several requests at a time.

    Args:
        url: its base, as `http://host:8000/v1`.
        model: name of the model there.
        api_key: sent as a bearer token.
        concurrency: requests under way.
        max_new: most tokens an answer.
        timeout: seconds for one answer.
        retries: tries more when the server is busy or out of reach, after 1, 2, 4, ... seconds.
        extra: more fields of the request body, as `{"chat_template_kwargs": {"enable_thinking": False}}`.
    """

    def __init__(
        self,
        url: str,
        model: str,
        *,
        api_key: str | None = None,
        concurrency: int = 64,
        max_new: int = 512,
        timeout: float = 600.0,
        retries: int = 6,
        extra: dict[str, Any] | None = None,
    ):
        if not url.startswith(("http://", "https://")):
            raise ValueError(f"a server is an address like http://host:8000/v1; got {url!r}")
        self.url = url.rstrip("/") + "/chat/completions"
        self.model, self.concurrency, self.max_new = model, concurrency, max_new
        self.timeout, self.retries, self.extra = timeout, retries, extra or {}
        self.headers = {"Content-Type": "application/json"}
        if api_key:
            self.headers["Authorization"] = f"Bearer {api_key}"
        self.first_wait = 1.0
        self._stop: Callable[[], bool] = lambda: False

    def _post(self, body: dict[str, Any]) -> dict[str, Any]:
        request = urllib.request.Request(self.url, json.dumps(body).encode(), self.headers)
        for attempt in range(self.retries + 1):
            try:
                with urllib.request.urlopen(request, timeout=self.timeout) as answer:
                    return json.loads(answer.read())
            except urllib.error.HTTPError as error:
                text = " ".join(error.read().decode(errors="replace").split())[:300]
                fault = f"{self.url} answered {error.code}: {text or error.reason}"
                if error.code not in _BUSY:
                    raise ValueError(fault) from None
            except (OSError, ValueError) as error:  # no connection, a cut one, or an answer that is no JSON
                fault = f"{self.url}: {getattr(error, 'reason', error)}"
            if attempt < self.retries and not self._stop():
                logger.info("%s; trying again", fault)
                until = time.monotonic() + self.first_wait * 2**attempt
                while time.monotonic() < until and not self._stop():
                    time.sleep(0.05)
        raise OSError(f"{fault} ({self.retries + 1} tries)")

    def _answer(self, dialogue: Dialogue) -> None:
        """Ask all turns of a dialogue, one after the other."""
        while dialogue.pending and not self._stop():
            body = {
                "model": self.model,
                "messages": dialogue.ask(),
                "temperature": dialogue.temperature,
                "max_tokens": self.max_new,
                **self.extra,
            }
            got = self._post(body)
            try:
                choice = got["choices"][0]
                message, reason = choice["message"], choice.get("finish_reason") or "stop"
                content = message.get("content") or ""
                thoughts = message.get("reasoning_content") or message.get("reasoning")
            except (KeyError, IndexError, TypeError, AttributeError):
                raise ValueError(f"{self.url} answered no chat completion: {json.dumps(got)[:300]}") from None
            made = {"role": "assistant", "content": content}
            if thoughts:
                made["reasoning_content"] = thoughts
            dialogue.messages.append(made)
            dialogue.finish = reason
            if reason != "stop":
                break
        if not dialogue.pending or dialogue.finish != "stop":
            dialogue.close_text()  # else a stop came between two turns

    def run(self, dialogues: Iterator[Dialogue], stop: Callable[[], bool]) -> Iterator[list[dict[str, Any]]]:
        """Yield the records of each finished dialogue.

        Raises:
            ValueError: the server refuses a request.
            OSError: it can't be reached, or stays busy.
        """
        fault: BaseException | None = None
        self._stop = lambda: fault is not None or stop()
        running: dict[Future, Dialogue] = {}
        with ThreadPoolExecutor(self.concurrency) as pool:
            exhausted = False
            while not self._stop():
                while not exhausted and len(running) < self.concurrency:
                    dialogue = next(dialogues, None)
                    exhausted = dialogue is None
                    if dialogue is not None:
                        running[pool.submit(self._answer, dialogue)] = dialogue
                if not running:
                    break
                for future in wait(running, timeout=0.2, return_when=FIRST_COMPLETED).done:
                    dialogue = running.pop(future)
                    if (error := future.exception()) is not None:
                        fault = fault or error
                    elif dialogue.records:
                        yield dialogue.records
            for future in running:
                future.cancel()
        # Requests that were under way have been waited for: their answers are paid for, so keep them.
        for future, dialogue in running.items():
            if not future.cancelled() and future.exception() is None and dialogue.records:
                yield dialogue.records
        if fault is not None:
            raise fault
