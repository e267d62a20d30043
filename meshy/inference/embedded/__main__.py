"""`python -m meshy.inference.embedded --model-path FOLDER --port PORT`: the embedded engine on its own."""

from __future__ import annotations

import argparse
import logging
import signal
from pathlib import Path

from meshy.inference.embedded.launch import EmbeddedOptions, EmbeddedServer


def main() -> None:
    defaults = EmbeddedOptions(model_path=Path())
    parser = argparse.ArgumentParser(prog="python -m meshy.inference.embedded", description=__doc__)
    parser.add_argument("--model-path", type=Path, required=True, help="model folder in Hugging Face format")
    parser.add_argument("--host", default=defaults.host)
    parser.add_argument("--port", type=int, default=defaults.port, help="0 takes a free one and prints it")
    parser.add_argument("--device", default=defaults.device, help="cpu, cuda, cuda:1, ...")
    parser.add_argument("--dtype", default=defaults.dtype, help="auto, float32, bfloat16, float16")
    parser.add_argument("--max-running-requests", type=int, default=defaults.max_running_requests)
    parser.add_argument("--context-length", type=int, default=None, help="default: the model's own")
    parser.add_argument("--weight-version", default=defaults.weight_version)
    parser.add_argument("--random-seed", type=int, default=None, help="makes unseeded requests repeatable")
    parser.add_argument("--threads", type=int, default=None, help="CPU threads of torch")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    server = EmbeddedServer(EmbeddedOptions(**vars(arguments)))
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: server.stop())
    server.start()
    print(f"ready on http://{arguments.host}:{server.port}", flush=True)
    server.wait()


if __name__ == "__main__":
    main()
