"""Putting the parts together: model, engine thread, HTTP thread."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import uvicorn

from meshy.inference.embedded.engine import Engine, EngineFailure
from meshy.inference.embedded.protocol import Limits, RequestFactory
from meshy.inference.embedded.runner import ModelRunner
from meshy.inference.embedded.server import Server
from meshy.inference.embedded.text import Text, end_tokens
from meshy.inference.parts import Parts
from meshy.listening import listen

DTYPES = {"auto": None, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

log = logging.getLogger("meshy.inference")


@dataclass(frozen=True, kw_only=True)
class EmbeddedOptions:
    """port 0: any free one. context_length None: the model's own. threads None: torch's default."""

    model_path: Path
    host: str = "127.0.0.1"
    port: int = 0
    device: str = "cpu"
    dtype: str = "auto"
    max_running_requests: int = 128
    context_length: int | None = None
    weight_version: str = "0"
    random_seed: int | None = None
    threads: int | None = None


class EmbeddedServer:
    """Construct (takes the port, loads the model), `start`, `wait`, `stop`. Raises OSError where the port is taken."""

    def __init__(self, options: EmbeddedOptions, on_busy: Callable[[float, float], None] | None = None) -> None:
        if options.threads is not None:
            torch.set_num_threads(options.threads)
        # Python hands the interpreter over only at this interval: at the default of 5 ms, an HTTP call being parsed
        # would hold up every operation of a decode step that takes less than 10 ms in all.
        sys.setswitchinterval(2e-4)
        self._socket = listen(options.host, options.port, backlog=2048)
        self.port: int = self._socket.getsockname()[1]
        text = Text(options.model_path)
        runner = ModelRunner(
            options.model_path,
            device=torch.device(options.device),
            dtype=DTYPES[options.dtype],
            slots=options.max_running_requests,
            context_length=options.context_length,
        )
        limits = Limits(
            runner.vocab_size,
            runner.context_length,
            end_tokens(options.model_path, runner.config, text.tokenizer),
        )
        self.engine = Engine(
            runner,
            max_running=options.max_running_requests,
            weight_version=options.weight_version,
            on_busy=on_busy,
            on_end=lambda: self._ended.set(),
        )
        arguments = {name: str(v) if isinstance(v, Path) else v for name, v in asdict(options).items()}
        self.server = Server(
            self.engine, RequestFactory(text, limits, options.random_seed), options.model_path, arguments
        )
        config = uvicorn.Config(
            self.server.app,
            interface="asgi3",
            proxy_headers=False,
            lifespan="off",
            ws="none",
            log_level="warning",
            access_log=False,
            timeout_keep_alive=30,
            timeout_graceful_shutdown=5,
        )
        self._uvicorn = uvicorn.Server(config)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="http", daemon=True)

    def start(self) -> None:
        self.engine.start()
        self._thread.start()

    def _serve(self) -> None:
        try:
            self._uvicorn.run(sockets=[self._socket])
        finally:
            self._ended.set()

    def free(self) -> Parts:
        """Give up the memory of weights and cache until `restore`; requests wait."""
        return self.engine.free().result()

    def restore(self, folder: Path | None, version: int | None) -> Parts:
        """Take it again, with the weights in that folder as that version, or as they were. Raises WeightError."""
        parts = self.engine.restore(folder, None if version is None else str(version)).result()
        if folder is not None:
            self.server.weights.model_path = str(folder)
        return parts

    def stop(self) -> None:
        """Ask the server to end; `wait` returns when it has. Callable from a signal handler."""
        self._ended.set()

    def wait(self) -> None:
        """Until `stop`, or until engine or HTTP fail: EngineFailure. Running requests are answered as aborted."""
        self._ended.wait()
        self.close()
        if self.engine.failure is not None:
            raise EngineFailure("the engine has failed") from self.engine.failure

    def close(self) -> None:
        """End the engine, then HTTP, so that every client still gets its answer. May be called twice."""
        self._ended.set()
        self.engine.close()
        self._uvicorn.should_exit = True
        if self._thread.ident is not None:
            self._thread.join(timeout=10)
        self._socket.close()
