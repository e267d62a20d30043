"""SGLang's engine in process, for comparison with its server; run by the interpreter that has SGLang.

On stdin, JSON: `arguments` of the server, `prompts` (token ids), `sampling`. Prints {"tokens_per_s": ...} as last line.
"""

import json
import sys
import time

if __name__ == "__main__":
    import sglang
    from sglang.srt.server_args import prepare_server_args

    job = json.load(sys.stdin)
    engine = sglang.Engine(server_args=prepare_server_args(job["arguments"]))

    def generate(prompts: list[list[int]]) -> int:
        """Tokens written; all prompts are given at once, and the engine runs as many as it may."""
        answers = engine.generate(input_ids=prompts, sampling_params=job["sampling"], return_logprob=True)
        return sum(answer["meta_info"]["completion_tokens"] for answer in answers)

    generate(job["prompts"][:128])
    began = time.perf_counter()
    tokens = generate(job["prompts"])
    seconds = time.perf_counter() - began
    engine.shutdown()
    print(json.dumps({"tokens_per_s": tokens / seconds}))
