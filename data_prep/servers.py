"""One server of the target: what it is asked and what its answers mean.

OpenAI's completions, with the prompt as token ids and vLLM's `return_token_ids`; SGLang, whose completions return no
ids, is asked through its own /generate.
"""

import json
import os
import time
from dataclasses import dataclass, field, replace
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any

import requests
import urllib3

from .errors import UserError
from .sampling import Sampling

CONNECT = 10  # seconds to accept a connection
GREETING = 60  # seconds to say which models there are
CHUNK = 1 << 16


class Refused(Exception):
    """The server will not answer this prompt, however often it is asked."""


class Misconfigured(Exception):
    """The server will not answer any prompt: wrong address, model or key."""


class Unavailable(Exception):
    """No answer this time. `wait`: seconds that the server asks for; `blameless`: it did not get to the prompt."""

    def __init__(self, reason: str, *, wait: float | None = None, blameless: bool = False):
        super().__init__(reason)
        self.wait, self.blameless = wait, blameless


@dataclass(frozen=True)
class Settings:
    """What every request asks for. `sampling` None is greedy; `ignore_eos`: go on past the model's own stop tokens."""

    max_new_tokens: int
    stop_ids: list[int]
    sampling: Sampling | None
    ignore_eos: bool = False


@dataclass(frozen=True)
class Reply:
    """An answer: its ids up to and including the first stop token; None where the server gave `text` only, which has no
    stop token; `stop` then names it if the server did. `meta` is what SGLang says beside it.
    """

    ids: list[int] | None
    text: str
    stopped: bool
    stop: int | None
    meta: dict[str, Any] = field(default_factory=dict)


class Server:
    """A server at `url` (the part before /completions and /models). UserError at once for what will never work."""

    def __init__(self, url: str, target: Path, settings: Settings, timeout: float):
        self.url, self.settings, self.timeout = url.rstrip("/"), settings, timeout
        if not self.url.startswith(("http://", "https://")):
            raise UserError(f"--server {url} is no address; pass one like http://node1:8000/v1.")
        key = os.environ.get("OPENAI_API_KEY")
        self.headers = {"Authorization": f"Bearer {key}"} if key else {}
        try:
            with requests.Session() as session:
                models = self._call(session, "GET", f"{self.url}/models", min(timeout, GREETING))["data"]
                names = [model["id"] for model in models]
        except (Refused, Misconfigured, Unavailable, KeyError, TypeError) as error:
            raise UserError(
                f"--server {url}: GET {self.url}/models gives no list of models ({error}); start the server, correct "
                "the address (it usually ends in /v1) and the key in OPENAI_API_KEY, or leave this server out."
            ) from error
        fitting = models
        if len(models) != 1:
            folder = target.resolve().name
            fitting = [m for m in models if folder in (Path(str(m.get(k))).name for k in ("id", "root"))]
        if len(fitting) != 1:
            raise UserError(
                f"--server {url} serves {', '.join(names) or 'nothing'}; it has to serve one model, or one whose name "
                f"ends in {folder}."
            )
        self.model: str = fitting[0]["id"]
        self.context: int | None = fitting[0].get("max_model_len")
        self.is_sglang = fitting[0].get("owned_by") == "sglang"
        limit = "no limit given" if self.context is None else f"{self.context} tokens of context"
        print(f"{self.url}: {self.model}, {limit}")

    def ask(self, session: requests.Session, prompt: list[int], seed: int) -> Reply:
        """The target's answer to `prompt`. Raises Refused, Misconfigured or Unavailable; UserError where the server
        changes the prompt.
        """
        if self.is_sglang:
            url, body = f"{self.url.removesuffix('/v1')}/generate", self._sglang_body(prompt, seed)
        else:
            url, body = f"{self.url}/completions", self._openai_body(prompt, seed)
        answer = self._call(session, "POST", url, self.timeout, body)
        try:
            if self.is_sglang:
                finish = answer["meta_info"]["finish_reason"]
                found = (answer.get("output_ids"), answer.get("text", ""), finish["type"], finish.get("matched"))
                used = answer.get("prompt_token_ids")
            else:
                choice = answer["choices"][0]
                found = (choice.get("token_ids"), choice["text"], choice["finish_reason"], choice.get("stop_reason"))
                used = choice.get("prompt_token_ids")
        except (KeyError, IndexError, TypeError, AttributeError) as error:
            raise Unavailable(f"an answer without {error}: {str(answer)[:200]}") from error
        if used is not None and used != prompt:
            raise UserError(
                f"{self.url} answered the prompt ids {str(used)[:80]} instead of {str(prompt)[:80]}: it changes "
                "prompts; serve the target with an engine that takes token ids as they are."
            )
        reply = self._reply(*found)
        return replace(reply, meta=answer["meta_info"]) if self.is_sglang else reply

    def _reply(self, ids: Any, text: Any, finish: Any, stop: Any) -> Reply:
        """Checks the parts of an answer; whatever engine it is, the first stop token ends it."""
        stops = self.settings.stop_ids
        stop = stop if stop in stops else None
        if finish not in ("stop", "length") or not isinstance(text, str):
            raise Unavailable(f"an answer that ended with {finish!r}: {text!r:.200}")
        if ids is None:
            if finish == "length" and not text:
                raise Unavailable("an answer without text")
            return Reply(None, text, finish == "stop", stop)
        if not isinstance(ids, list) or not all(type(i) is int and i >= 0 for i in ids):
            raise Unavailable(f"token ids {str(ids)[:200]}")
        end = next((i for i, token in enumerate(ids) if token in stops), None)
        if end is not None:
            ids = ids[: end + 1]
        elif finish == "stop":
            if stop is None:
                raise Unavailable(f"an answer that ended with none of the stop tokens {stops}: {str(ids[-5:])}")
            ids = [*ids, stop]
        if not ids:
            raise Unavailable("an answer without tokens")
        return Reply(ids, text, ids[-1] in stops, stop)

    def _openai_body(self, prompt: list[int], seed: int) -> dict[str, Any]:
        # everything that servers would otherwise take from generation_config.json is said
        body = {
            "model": self.model,
            "prompt": prompt,
            "max_tokens": self.settings.max_new_tokens,
            "stop_token_ids": self.settings.stop_ids,
            "return_token_ids": True,
            "add_special_tokens": False,
            "skip_special_tokens": False,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "min_p": 0.0,
        }
        return body | self._sampling() | self._eos() | ({"seed": seed} if self.settings.sampling else {})

    def _sglang_body(self, prompt: list[int], seed: int) -> dict[str, Any]:
        settings = {
            "max_new_tokens": self.settings.max_new_tokens,
            "stop_token_ids": self.settings.stop_ids,
            "skip_special_tokens": False,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "min_p": 0.0,
        }
        settings |= self._sampling() | self._eos() | ({"sampling_seed": seed} if self.settings.sampling else {})
        return {"input_ids": prompt, "sampling_params": settings}

    def _eos(self) -> dict[str, Any]:
        return {"ignore_eos": True} if self.settings.ignore_eos else {}

    def _sampling(self) -> dict[str, Any]:
        sampling = self.settings.sampling
        if sampling is None:
            return {"temperature": 0.0, "top_p": 1.0, "top_k": -1}
        return {"temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": sampling.top_k or -1}

    def _call(
        self, session: requests.Session, method: str, url: str, timeout: float, body: dict[str, Any] | None = None
    ) -> Any:
        """The JSON of the answer, which has to be whole within `timeout` seconds."""
        deadline = time.monotonic() + timeout
        try:
            with session.request(
                method, url, json=body, headers=self.headers, stream=True, timeout=(CONNECT, timeout)
            ) as response:
                content = b""
                while chunk := response.raw.read1(CHUNK, decode_content=True):
                    content += chunk
                    if time.monotonic() > deadline:
                        raise Unavailable(f"no whole answer within {timeout} s")
        except requests.Timeout as error:
            unmet = isinstance(error, requests.ConnectTimeout)
            reason = "no connection" if unmet else f"no answer within {timeout} s"
            raise Unavailable(reason, blameless=unmet) from error
        except (requests.RequestException, urllib3.exceptions.HTTPError, OSError) as error:
            # a refused connection comes as NewConnectionError inside of others; a broken one does not
            cause = getattr(error.args[0], "reason", None) if error.args else None
            unmet = isinstance(cause, urllib3.exceptions.NewConnectionError)
            raise Unavailable(f"{type(cause or error).__name__}: {cause or error}", blameless=unmet) from error
        _check_status(response, content)
        try:
            return json.loads(content)
        except ValueError as error:
            raise Unavailable(f"an answer that is not JSON: {content[:200]!r}") from error


def _check_status(response: requests.Response, content: bytes) -> None:
    """Raises what a status other than success means."""
    status = response.status_code
    if status < 400:
        return
    reason = f"status {status}: {content[:300].decode('utf-8', 'replace')}"
    if status in (401, 403, 404, 405):
        raise Misconfigured(reason)
    if status < 500 and status not in (408, 425, 429):
        raise Refused(reason)
    raise Unavailable(reason, wait=_retry_after(response), blameless=status in (429, 503))


def _retry_after(response: requests.Response) -> float | None:
    """Seconds from the Retry-After header, a number or a date; None without a usable one."""
    value = response.headers.get("Retry-After", "")
    try:
        return max(float(value), 0.0)
    except ValueError:
        pass
    try:
        return max(parsedate_to_datetime(value).timestamp() - time.time(), 0.0)
    except ValueError:
        return None
