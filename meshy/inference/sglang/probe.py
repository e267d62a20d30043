"""Run in SGLang's own interpreter, which need not have Meshy: what is installed there, and does a command line fit it?

Reads one JSON object from its argument: `version` (the one wanted), `arguments` (words of the command line, or null),
`names` (arguments by name), `architectures`, `gpu`. Prints one JSON object, on a line of its own. Importing SGLang
takes seconds, so that is done only where there are names to look up.
"""

import argparse
import importlib.metadata
import importlib.util
import json
import re
import sys
from pathlib import Path


def main(request):
    try:
        version = importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:
        return {"version": None}
    if version != request["version"]:
        return {"version": version}
    told = {"version": version, "unknown_architectures": unknown_architectures(request["architectures"])}
    if request["gpu"]:
        import torch

        told["sees_gpu"] = torch.cuda.is_available()
    if request["names"]:
        told.update(check_arguments(request["names"], request["arguments"]))
    return told


def unknown_architectures(names):
    """Those that neither SGLang nor, for its fallback, transformers has. SGLang's own are read from its sources."""
    spec = importlib.util.find_spec("sglang")
    assert spec is not None and spec.submodule_search_locations is not None
    folder = Path(spec.submodule_search_locations[0]) / "srt" / "models"
    known = set()
    for file in folder.glob("*.py"):
        for listed in re.findall(r"^EntryClass\s*=\s*(\[[^\]]*\]|\w+)", file.read_text(errors="replace"), re.MULTILINE):
            known.update(re.findall(r"\w+", listed))
    unknown = [name for name in names if name not in known]
    if unknown:
        import transformers

        unknown = [name for name in unknown if not hasattr(transformers, name)]
    return unknown


class Parser(argparse.ArgumentParser):
    def error(self, message):
        raise ValueError(message)


def check_arguments(names, words):
    """`options`: every argument's names -> its field; `refused`: what the parser says of the whole command line."""
    from sglang.srt.server_args import ServerArgs

    parser = Parser(prog="sglang.launch_server", allow_abbrev=False)
    ServerArgs.add_cli_args(parser)
    options = {
        option.lstrip("-").replace("-", "_"): action.dest
        for action in parser._actions
        for option in action.option_strings
    }
    refused = None
    if all(name in options for name in names):
        try:
            parser.parse_args(words)
        except ValueError as error:
            refused = str(error)
    return {"options": options, "refused": refused}


if __name__ == "__main__":
    answer = main(json.loads(sys.argv[1]))
    print("\n" + json.dumps(answer))
